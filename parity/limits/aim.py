"""How often a run may raise a false alarm, from which all limits follow."""

# A whole run of the default suite is to raise a false alarm less often than once in a thousand runs.
FALSE_ALARMS_A_RUN = 1e-3
# Statistics that such a run judges, rounded up: about 300 comparisons of 6 tensors by 7 statistics each.
STATISTICS_A_RUN = 20_000


def describe() -> str:
    """How limits are set, in two sentences."""
    return (
        "Each tensor is judged by several statistics of its error: the norm, the largest element, the worst row and "
        "slice, what leans, what resembles a known mistake; on Gaussian and on probing inputs. A limit is what a "
        "faithful port exceeds so rarely that a whole run of the default suite raises a false alarm less often than "
        f"once in {1 / FALSE_ALARMS_A_RUN:,.0f} runs."
    )
