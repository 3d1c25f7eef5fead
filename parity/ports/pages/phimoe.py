"""PhiMoE, whose router draws experts in training, and in evaluation takes the best two that a threshold leaves."""

from parity.ports.form import Config, Form


def adapt(form: Form, config: Config) -> None:
    """Tell what names and modules do not."""
    assert form.experts is not None
    form.experts.score = "sparsemixer"
    form.gaps.append(
        "in training, the router draws experts at random, and no two draws can be compared: the pairs compare outputs "
        "in evaluation. The port calls transformers' own sparsemixer, so it draws as the model does when it trains"
    )
