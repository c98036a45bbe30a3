"""The `baton` command: one parser, one function a subcommand.

    up, serve MODEL            a whole cluster on this machine
    gateway, prefill, decode, mixed    one process, as compose and Kubernetes run them
    chat                       talk to any gateway from a terminal

Every refusal is one sentence on stderr and exit status 1 (2 for a command line that makes no
sense). What a subcommand runs is imported when it runs, so that `baton --help` and `baton chat`
start at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from core.errors import ConfigError, ServeError
from core.worker_info import Role
from services.cli import demo_model
from services.config import build
from services.config.logs import configure_logging
from services.config.settings import Setting
from services.config.sources import add_flags, collect, normalise_arguments

_EPILOG = (
    "Each setting can also stand in the environment (BATON_BLOCK_SIZE=32) or in the file of "
    "--config (block-size: 32). A flag goes before the environment, the environment before the file."
)


class _Parser(argparse.ArgumentParser):
    """Argument errors as ConfigError, so that they are said like any other refusal."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class UsageError(ConfigError):
    """The command line makes no sense."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        given = normalise_arguments(sys.argv[1:] if arguments is None else arguments)
        namespace = make_parser().parse_args(given)
        run: Callable[[argparse.Namespace], int] = namespace.run
        return run(namespace)
    except UsageError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2
    except ServeError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="baton", description="Serve language models, prefill and decode apart.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    up = _add(commands, "up", "start a cluster on this machine, on the demo model by default", _up)
    add_flags(up, build.cluster_settings())
    serve = _add(commands, "serve", "start a cluster on this machine for one model", _up)
    serve.add_argument("model", metavar="MODEL", help="GGUF file, model folder or Hub id.")
    add_flags(serve, _without_model(build.cluster_settings()))
    gateway = _add(commands, "gateway", "run one gateway", _gateway)
    add_flags(gateway, build.gateway_settings())
    for role in Role:
        worker = _add(commands, role.value, f"run one {role.value} worker", _worker(role))
        worker.add_argument(
            "model",
            metavar="MODEL",
            nargs="?",
            default=argparse.SUPPRESS,
            help="the same as --model.",
        )
        add_flags(worker, build.worker_settings())
    chat = _add(commands, "chat", "talk to a gateway", _chat)
    _add_chat_flags(chat)
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, epilog=_EPILOG, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _without_model(settings: Sequence[Setting]) -> list[Setting]:
    return [setting for setting in settings if setting.name != "model"]


def _up(namespace: argparse.Namespace) -> int:
    from services.cluster.launcher import launch
    from services.cluster.words import Words

    found = collect(build.cluster_settings(), namespace, os.environ, build.all_setting_names())
    if "model" not in found:
        found["model"] = str(demo_model.path())
        found.setdefault("served-model-name", (demo_model.NAME,))
    config = build.build_cluster(found, os.environ)
    return launch(config, Words(verbose=config.verbose))


def _gateway(namespace: argparse.Namespace) -> int:
    found = collect(build.gateway_settings(), namespace, os.environ, build.all_setting_names())
    config = build.build_gateway(found)
    configure_logging(config.log_level)
    from services.gateway.main import run_until_stopped

    def show(port: int) -> None:
        print(f"baton: gateway listens on http://{config.host}:{port}", flush=True)

    run_until_stopped(config, show)
    return 0


def _worker(role: Role) -> Callable[[argparse.Namespace], int]:
    def run(namespace: argparse.Namespace) -> int:
        from services.worker.main import run_worker

        found = collect(build.worker_settings(), namespace, os.environ, build.all_setting_names())
        config = build.build_worker(found, role)
        configure_logging(config.log_level)
        return run_worker(config)

    return run


def _chat(namespace: argparse.Namespace) -> int:
    from services.cli.chat import ChatOptions, run_chat

    return run_chat(
        ChatOptions(
            url=namespace.url.rstrip("/").removesuffix("/v1"),
            model=namespace.model,
            api_key=namespace.api_key,
            system=namespace.system,
            max_tokens=namespace.max_tokens,
            temperature=namespace.temperature,
        )
    )


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="the gateway (default: %(default)s).")
    parser.add_argument("--model", default="", help="a served model; by default the first one.")
    parser.add_argument(
        "--api-key", default=os.environ.get("BATON_API_KEY", ""), help="the gateway's key."
    )
    parser.add_argument("--system", default="", help="what the model is told to be.")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="longest answer (default: %(default)s)."
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 is greedy, what small models need (default: %(default)s).",
    )


if __name__ == "__main__":
    sys.exit(main())
