"""The tables of names and numbers that are read from TOML files in the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.data_files import read_toml
from parity.mistakes import usual_numbers
from parity.mistakes.usual_numbers import USUAL, UsualNumbers
from parity.user_error import UserError
from parity.weights.suggest import vocabulary
from parity.weights.suggest.units import parts_by_unit, units_of
from parity.weights.suggest.vocabulary import VOCABULARY, Vocabulary

NUMBERS = Path(usual_numbers.__file__).with_suffix(".toml")
NAMES = Path(vocabulary.__file__).with_suffix(".toml")


def test_the_likeliest_number_comes_first() -> None:
    assert (USUAL.norm_eps[0], USUAL.rope_bases[0], USUAL.head_dims[0]) == (1e-5, 10_000.0, 128)


def test_each_name_of_a_layer_shows_its_parts() -> None:
    for layer in VOCABULARY.layers:
        for name in layer.names:
            (unit,) = units_of({f"model.{name}.weight": (8, 8)})
            assert parts_by_unit([unit])[unit] == layer.parts


def test_each_name_of_a_norm_shows_its_part() -> None:
    for part, names in VOCABULARY.norms.items():
        for name in names:
            (unit,) = units_of({f"model.{name}.weight": (8,)})
            assert parts_by_unit([unit]) == {unit: (part,)}


@pytest.mark.parametrize(
    ("table", "kind", "right", "wrong", "told"),
    [
        (NUMBERS, UsualNumbers, "1e-6, 1e-8", '"1e-6", 1e-8', "norm_eps.1: Input should be a valid number"),
        (NUMBERS, UsualNumbers, "1e-6, 1e-8", "-1e-6, 1e-8", "norm_eps.1: Input should be greater than 0"),
        (NUMBERS, UsualNumbers, "momenta =", "momentums =", "momenta: Field required; momentums: Unexpected"),
        (NUMBERS, UsualNumbers, "[2, 4, 8]", "[2, 4.5, 8]", "norm_groups.1: Input should be a valid integer"),
        (NUMBERS, UsualNumbers, "[2, 4, 8]", "[2, 4 8]", r"is not TOML: Unclosed array \(at line 12, column 21\)"),
        (NAMES, Vocabulary, '["down"]', '["downn"]', "layers.9.parts.0: Input should be 'query'"),
        (NAMES, Vocabulary, '"o_proj"', '"O_proj"', "layers.5.names.1: String should match"),
        (NAMES, Vocabulary, '"o_proj"', '"k"', "layers: 'k' stands there 2 times"),
        (NAMES, Vocabulary, "key_norm", "keynorm", r"norms.keynorm.\[key\]: Input should be 'query_norm'"),
    ],
)
def test_a_mistake_in_a_table_is_told_with_file_and_key(
    tmp_path: Path, table: Path, kind: type, right: str, wrong: str, told: str
) -> None:
    text = table.read_text(encoding="utf-8")
    assert right in text
    (file := tmp_path / table.name).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    with pytest.raises(UserError, match=f"{table.name}.*{told}"):
        read_toml(file, kind)
