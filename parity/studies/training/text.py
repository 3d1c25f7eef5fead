"""The text that small language models train on, byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.inputs import Rng

VOCABULARY = 256

TEXT = """\
The keeper of the lighthouse kept two logs. In the first he wrote what he saw: the wind, the height of the waves, the
ships that passed and the hour at which they passed. In the second he wrote what he had reckoned the day before, so that
each morning he could lay the two books side by side and see by how much he had been wrong.

He was never quite right. The wind that he had called fresh was strong, the ship that he had expected at noon came at
one. In the first year he tried to make the differences vanish. He measured the waves with a longer rod, he asked the
captains for their times, he wrote down three figures where he had written two. The differences grew smaller, but they
did not go away, and some mornings they were as large as ever.

In the second year he stopped asking why he was wrong and asked how wrong he ought to be. A rod that is marked in feet
cannot tell inches. A clock that loses a minute a day cannot tell seconds. He made a third book, and in it he wrote, for
each thing that he reckoned, how far from the truth an honest man with his rod and his clock would be. On most mornings
the two logs differed by less than the third book allowed, and he had his breakfast in peace.

Then came a week in which the ships were late, every one of them, by a quarter of an hour. A quarter of an hour was not
much; in his first year he would have blamed the wind. But the third book said four minutes. He climbed to the lamp and
looked at the clock, and found that the boy who wound it had set it by the sun, and not by the signal from the harbour.
He set it right, and the ships came in on time.

When he was old he told the boy, who was now the keeper, what he had learned. Do not ask that the books agree, he said,
for they never will. Do not be content that they nearly agree, for the clock may be wrong all the same. Ask first what
difference there must be, and then look at the difference there is. If it is smaller, go and have your breakfast. If it
is larger, climb the stairs.

The boy wrote that down as well. He wrote it in the first book, with the date and the weather, between a schooner bound
north with timber and a fishing boat that came home empty. Then he opened the third book, and ruled a new page, and made
a column for the things that old men say. He thought for a while about how far from the truth they would be, and left it
blank, and went up to light the lamp.

That night there was fog. The horn sounded twice a minute, and he counted the seconds between one blast and the next on
the clock that was set by the harbour. Thirty, thirty, thirty-one, thirty. The third book allowed one. Somewhere below a
bell answered, and then another, further out, and he wrote down both, and the hour, and that he could see nothing.
"""


def batches(seed: int, steps: int, batch: int, seq: int) -> list[Tensor]:
    """Random windows of the text.

    Returns:
        ``steps`` int64 tensors ``[batch, seq + 1]`` of bytes: inputs are all but the last, targets all but the first.
    """
    data = torch.tensor(list(TEXT.encode("ascii")))
    starts = Rng(seed, "batches").integers(steps, batch, high=len(data) - seq)
    return list(data[starts[..., None] + torch.arange(seq + 1)])
