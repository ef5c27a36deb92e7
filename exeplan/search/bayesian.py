"""Bayesian search by optuna's tree-structured Parzen estimator: it relies on nothing, proves nothing, and compares."""

from typing import TYPE_CHECKING

from exeplan.search.grid import Grid

if TYPE_CHECKING:
    import optuna


def sample(grid: Grid, *, num_trials: int, seed: int) -> None:
    """Tries the lower-left corner and what the sampler suggests after it, `num_trials` in all, repeats included."""
    import optuna

    def score(trial: "optuna.Trial") -> float:
        index = tuple(trial.suggest_int(str(k), 0, last) for k, last in enumerate(grid.top))
        outcome = grid(index)
        return -grid.limits.load(outcome) if grid.limits.broken(outcome) else outcome.throughput

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        study.enqueue_trial({str(k): 0 for k in range(len(grid.shape))})
        study.optimize(score, n_trials=num_trials)
    finally:
        optuna.logging.set_verbosity(verbosity)
