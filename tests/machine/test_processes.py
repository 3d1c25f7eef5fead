"""Processes that share out work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

INTERRUPTED = """
import os, signal, time
from parity.machine.process import processes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with processes(2) as pool:
            pool.submit(os.getpid).result()
            jobs = [pool.submit(time.sleep, 600) for _ in range(4)]
            print("began", flush=True)
            jobs[0].result()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interruption_ends_all_of_them_and_they_say_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")
