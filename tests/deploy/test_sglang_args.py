"""SGLang's options for Kimi: the plugin's rules accept them, and SGLang knows them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from serve_app.engines.sglang.arguments import DECIDED, server_arguments
from serve_app.sglang_plugin.args import Options, check_backends, check_widths
from tests.conftest import require_sglang
from tests.deploy.configs import BARE_METAL, DEPLOY, config_of, read

START = DEPLOY / "sglang" / "start.sh"
FILE = DEPLOY / "sglang" / "kimi-k2.6-b300.args"
# The block of the published drafter for this family; the plugin reads it from the drafter's own configuration.
BLOCK = 8


def command(*more: str) -> list[str]:
    env = {**os.environ, "DRY_RUN": "1", "PYTHON": "python3"}
    done = subprocess.run([str(START), str(FILE), *more], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def options() -> dict[str, str]:
    words = command()[3:]
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_the_command_runs_sglang_with_more_options_last() -> None:
    words = command("--port", "1234")
    assert words[:3] == ["python3", "-m", "sglang.launch_server"] and words[-2:] == ["--port", "1234"]


def test_no_comment_reaches_the_command() -> None:
    assert not any(word.startswith("#") for word in command())


def test_the_plugin_accepts_the_widths() -> None:
    chosen = options()
    width, topk = (int(chosen[f"--speculative-{name}"]) for name in ("num-draft-tokens", "eagle-topk"))
    check_widths(Options(width=width, topk=topk, block_size=BLOCK))


def test_the_plugin_accepts_the_backends_for_latent_attention() -> None:
    chosen = options()
    prefill, decode = chosen["--prefill-attention-backend"], chosen["--decode-attention-backend"]
    check_backends(prefill, decode, chosen["--speculative-attention-mode"], mla=True)


def test_the_plugin_refuses_sglangs_own_choice_of_backend() -> None:
    """The reason why the file names backends at all."""
    with pytest.raises(ValueError, match="trtllm_mla does not read a tree mask"):
        check_backends("trtllm_mla", "trtllm_mla", "decode", mla=True)


def test_it_agrees_with_the_serve_configuration() -> None:
    chosen, config = options(), config_of(read(BARE_METAL["kimi-k2.6-b300"]))
    assert chosen["--served-model-name"] == config.model.id
    assert chosen["--model-path"] == config.model.source
    assert chosen["--speculative-draft-model-path"] == config.model.drafter
    assert int(chosen["--tp-size"]) == config.replica.num_gpus
    assert int(chosen["--context-length"]) == config.model.context_length
    assert int(chosen["--speculative-num-draft-tokens"]) - 1 == config.speculation.budget
    assert int(chosen["--speculative-eagle-topk"]) == config.speculation.top_k
    assert int(chosen["--max-running-requests"]) == config.engine.max_running


def test_the_serve_configuration_starts_sglang_with_the_same_arguments() -> None:
    config = config_of(read(BARE_METAL["kimi-k2.6-b300"]))
    assert config.model.drafter is not None
    names = {*DECIDED, *config.sglang.server_args}
    made = server_arguments(config, Path(config.model.source), Path(config.model.drafter), names)
    # What the file leaves to SGLang's default, and what a server of its own needs.
    own = {"dtype", "device", "disable_cuda_graph", "incremental_streaming_output", "log_level"}
    theirs = {"host", "port"}
    wanted = {n.removeprefix("--").replace("-", "_"): yaml.safe_load(v or "true") for n, v in options().items()}
    assert {n: v for n, v in made.items() if n not in own} == {n: v for n, v in wanted.items() if n not in theirs}


def test_it_listens_on_this_machine_alone() -> None:
    """SGLang has routes that change it, and no key is set here; a reverse proxy stands in front."""
    assert options()["--host"] == "127.0.0.1"


def test_sglang_knows_every_option() -> None:
    require_sglang()
    from sglang.srt.server_args import ServerArgs

    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert {name.removeprefix("--").replace("-", "_") for name in options()} <= fields
