"""A profile keeps its reference passes, and how steady its machine was; what is no number is refused by name."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from exeplan.core.profile import Profile, ReferencePass, load_profile, save_profile
from exeplan.errors import InputError

WATCHED = {
    "speed_spread": 0.08,
    "calibration_error": 0.014,
    "prefill_calibration": 1.1,
    "kept_rows_calibration": 1.02,
    "kept_rows_error": 0.03,
    "pass_seconds": 0.0007,
    "last_layer_saving": 0.84,
}
PASS = ReferencePass(kind="decode", num_seqs=16, num_tokens=128, num_layers=6, seconds=0.007, error=0.02)


def test_what_was_watched_is_written_and_read(profile: Profile, tmp_path: Path) -> None:
    watched = replace(profile, reference_passes=(PASS,), **WATCHED)
    save_profile(watched, tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json")
    assert found.reference_passes == (PASS,)
    assert {name: getattr(found, name) for name in WATCHED} == WATCHED


def test_a_profile_that_was_not_watched_says_nothing_of_it(profile: Profile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "p.json")
    assert not {*WATCHED, "reference_passes"} & set(json.loads((tmp_path / "p.json").read_text()))


def test_only_what_changes_predictions_changes_the_fingerprint(profile: Profile) -> None:
    assert replace(profile, reference_passes=(PASS,), speed_spread=0.5).fingerprint == profile.fingerprint
    assert replace(profile, prefill_calibration=1.1).fingerprint != profile.fingerprint
    assert replace(profile, kept_rows_calibration=1.1).fingerprint != profile.fingerprint
    assert replace(profile, last_layer_saving=0.8).fingerprint != profile.fingerprint


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("speed_spread", "fast", "speed_spread must be a number of at least 0"),
        ("calibration_error", -0.1, "calibration_error must be a number of at least 0"),
        ("last_layer_saving", 1, "last_layer_saving must be a number of at least 0 and below 1"),
        ("prefill_calibration", 0, "prefill_calibration must be a positive number"),
        ("kept_rows_calibration", "1", "kept_rows_calibration must be a positive number"),
        ("reference_passes", [{"kind": "verify"}], "is not a profile"),
        ("reference_passes", [{**asdict(PASS), "kind": "verify"}], "unknown kind"),
        ("reference_passes", [{**asdict(PASS), "num_layers": 99}], "larger than the model"),
        ("reference_passes", [{**asdict(PASS), "seconds": -1}], "not a positive number"),
        ("reference_passes", [{**asdict(PASS), "error": "x"}], "not a number of at least 0"),
    ],
)
def test_what_cannot_be_is_refused(profile: Profile, tmp_path: Path, name: str, value: object, words: str) -> None:
    path = tmp_path / "p.json"
    save_profile(profile, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(InputError, match=words):
        load_profile(path)
