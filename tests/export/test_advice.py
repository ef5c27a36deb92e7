"""`exeplan optimize` names the export of a plan exactly where `exeplan export` takes it, for every engine, policy and
placement; where it does not, the sentence is that of the refusal."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality.exported import plans
from exeplan.cli import main
from exeplan.commands.optimize import _exported_by
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import save_plan
from exeplan.core.schedule import Schedule
from exeplan.export import exporter_names
from exeplan.policies import policy_names

PLANS = dict(plans())
OF_POLICY = {
    "concat": {"max_num_seqs": 8, "rows": 2, "row_tokens": 512, "slot_tokens": 512},
    "static": {"batch_size": 8},
    "turbo": {"batch_size": 8, "overhead_tokens": 16},
    "waa-m": {"decode_batch": 600, "prefill_batch": 12, "micro_batches": 3},
}
"""Policies of which no other plan is here."""
PLANS |= {
    name: replace(PLANS["2P3D" if name == "waa-m" else "chunked"], schedule=Schedule(name, variables))
    for name, variables in OF_POLICY.items()
}


def test_every_policy_is_among_the_plans() -> None:
    assert {plan.schedule.policy for plan in PLANS.values()} == set(policy_names())


@pytest.mark.parametrize("engine", sorted({*exporter_names()} - {"exeplan"}))
def test_the_advice_is_what_the_export_does(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, done = {}, {}
    for name, plan in PLANS.items():
        file = tmp_path / "plan.yaml"
        save_plan(plan, file)
        sentence = _exported_by(plan, load_model_spec(plan.model), engine, file)
        said[name] = sentence.removeprefix(f"; not for {engine}: ").removeprefix(f"; for {engine}: ")
        code = main(["export", str(file), "--to", engine, "--model", "organisation/name"])
        error = capsys.readouterr().err
        done[name] = f"`exeplan export {file} --to {engine}`" if code == 0 else error.removeprefix("exeplan: ").strip()
        assert (code == 0) == sentence.startswith(f"; for {engine}")
    assert {name: text for name, text in said.items() if text not in done[name]} == {}
