"""``grpo STAGE --config FILE``: the stages of the pipeline, by name."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "make-data": "grpo.make_data",
    "prepare": "grpo.prepare",
    "policy": "grpo.policy",
    "train": "grpo.train",
    "evaluate": "grpo.evaluate",
    "report": "grpo.report",
    "score": "grpo.score",
    "plan": "grpo.plan",
    "export": "grpo.export",
}


def main() -> None:
    """Run one command; a mistake of the user's ends in one line that says what to do."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: grpo {{{','.join(COMMANDS)}}} [--help] [--config FILE] [--key value ...]")
        return
    if name not in COMMANDS:
        sys.exit(f"grpo: there is no command {name!r}; choose one of {', '.join(COMMANDS)}")
    module = import_module(COMMANDS[name])
    try:
        module.main(arguments)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        print(f"grpo {name}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 2))


def _is_ours(error: Exception) -> bool:
    """Whether this package raised it, for the user to read; from a library it is a fault, whose trace is needed."""
    if isinstance(error, RuntimeError):  # torch raises these too, from operations that stand in our files
        return type(error).__module__.partition(".")[0] == __package__
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    main()
