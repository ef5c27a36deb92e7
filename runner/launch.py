"""An engine in this process, as a plan describes it: what `exeplan bench` runs and the engine's own process builds."""

from exeplan.inputs import engine_blocks
from exeplan.model import ModelSpec
from exeplan.plan import Plan
from exeplan.runner.engine import Engine
from exeplan.runner.model_runner import ModelRunner
from exeplan.runner.tokenizer import Tokenizer


def build_engine(plan: Plan, spec: ModelSpec, *, dummy_weights: bool = False) -> Engine:
    """Loads the model and warms it up. Sets torch's compute threads to the plan's: a process has one engine."""
    import torch

    torch.set_num_threads(plan.num_threads)
    num_blocks = engine_blocks(plan, spec)
    runner = ModelRunner(
        spec,
        dtype=plan.dtype or "float32",
        device=plan.device or "cpu",
        num_blocks=num_blocks,
        dummy_weights=dummy_weights,
    )
    engine = Engine(runner, plan.schedule, tokenizer=Tokenizer.load(spec), num_blocks=num_blocks)
    warm_up(engine)
    return engine


def warm_up(engine: Engine, num_requests: int = 4, num_tokens: int = 8) -> None:
    """Runs a few short requests, so that the first real one does not pay for torch's first calls."""
    from exeplan.runner.engine import Request
    from exeplan.runner.sampling import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(num_requests):
        engine.add(Request(request_id=f"warm-up-{index}", prompt_token_ids=[0] * num_tokens, sampling=sampling))
    while engine.has_work:
        engine.step()
