"""`rfork check SEED -- <server args>`: would a server started so fork from SEED? Every field that differs, if not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from rfork.auth import Signer
from rfork.client.calls import bearer
from rfork.client.lease import take_lease
from rfork.client.resolve import Candidate, resolve, seed_url
from rfork.client.sources import signer_of, tls_of
from rfork.config import load_config
from rfork.errors import ConfigError, RForkError, SeedError, SeedRefused
from rfork.identity import Content, ModelIdentity, instance_key, new_instance_id
from rfork.tls import Tls
from rfork.wanted import Wanted, WantedModel
from rfork.wire.seed import LeaseRequest

EXIT_USAGE = 2
RESOLVE_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 15.0
WHERE_KEYS_ARE = (
    "The fleet key is taken from RFORK_KEY_FILE, RFORK_KEY or --rfork-config, SGLang's from --api-key, as by a server"
)


def command(
    seed: Annotated[str, typer.Argument(help="A running instance: host:port of SGLang's own port.")],
    server_args: Annotated[
        list[str], typer.Argument(metavar="-- SERVER ARGS", help="The arguments of the server that would be started.")
    ],
) -> None:
    """Say whether a server with these arguments could fork from SEED now, and every field that differs if not.

    Nothing is started and no GPU is used: the arguments are resolved as SGLang would, and the seed itself decides, by a
    lease that is given back at once. Keys and certificates are those that such a server would have, from its arguments
    and this environment.

    Exit status: 0 yes, 1 no, 2 can't tell.
    """
    try:
        seed_url(seed)  # before SGLang is imported, which takes a while
        is_yes = answer(seed, _wanted_by(server_args))
    except (ValueError, ConfigError, SeedError) as error:
        typer.echo(f"can't tell: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    raise typer.Exit(0 if is_yes else 1)


def answer(seed: str, wanted: Wanted) -> bool:
    """Print the seed's verdict on every model of `wanted`, which is asked for as a client of these settings would.

    Raises ConfigError, and SeedError where the seed can't be asked: nobody is there, or it has another fleet key.
    """
    settings = load_config(wanted.config)
    tls, signer = tls_of(settings), signer_of(settings)
    headers = bearer(wanted.api_key) if wanted.api_key else None
    try:
        candidate = resolve(seed, timeout_s=CALL_TIMEOUT_S, tls=tls, headers=headers, signer=signer)
    except SeedRefused as refusal:
        if refusal.reason != "unauthorized":
            raise
        raise SeedRefused(f"{refusal}. {WHERE_KEYS_ARE}", reason=refusal.reason) from refusal
    verdicts = [_verdict(candidate, model, wanted.weights, tls, signer) for model in wanted.models]  # each is printed
    return all(verdicts)


def _verdict(candidate: Candidate, model: WantedModel, weights: str, tls: Tls, signer: Signer | None) -> bool:
    """Ask for a lease of one model's first shard, and print what came of it."""
    name = "target" if model.rank.role == "target" else "draft"
    who = f"{candidate.instance_id} at {candidate.address}"
    if not model.content:
        typer.echo(f"{name}: no: {model.problem}")
        return False
    identity = ModelIdentity(model.engine, model.fields)
    request = LeaseRequest(
        client=new_instance_id(),
        instance_key=instance_key(identity, Content.parse(model.content)),
        identity=model.fields,
        engine=model.engine,
        content=model.content,
        rank=model.rank,
        weights=weights,
        seed=candidate.instance_id,
    )
    try:
        take_lease(candidate.listener, request, timeout_s=CALL_TIMEOUT_S, tls=tls, signer=signer).release()
    except SeedRefused as refusal:
        differing = [*refusal.differing, *_content_too(refusal, candidate, model, weights)]
        typer.echo(f"{name}: no: {refusal}")
        for field, here, there in differing:
            typer.echo(f"  {field}: {_shown(here)} here, {_shown(there)} there")
        return False
    except RForkError as error:
        typer.echo(f"{name}: no: {error}")
        return False
    typer.echo(f"{name}: yes, {len(model.fields)} fields and the content ({model.content}) are those of {who}")
    return True


def _content_too(
    refusal: SeedRefused, candidate: Candidate, model: WantedModel, weights: str
) -> Iterator[tuple[str, object, object]]:
    """Seeds compare content once the identity is equal; here both are of interest."""
    is_other = model.rank.role == "target" and weights == "checkpoint" and model.content != candidate.content
    if is_other and candidate.content and not any(field == "content" for field, *_ in refusal.differing):
        yield "content", model.content, candidate.content


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def _wanted_by(server_args: list[str]) -> Wanted:
    """Resolve the arguments in a process of their own. Raises ConfigError with what it said if it could not."""
    load_config()  # what is wrong in the environment shows at once
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answer:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "sglang_rfork.srt.check", str(write_fd), *server_args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write_fd],
            )
        finally:
            os.close(write_fd)
        with _ending(child):
            try:
                said, _ = child.communicate(timeout=RESOLVE_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise ConfigError(f"these arguments were not resolved within {RESOLVE_TIMEOUT_S:g} s") from error
        try:
            return msgspec.json.decode(answer.read(), type=Wanted)
        except msgspec.MsgspecError as error:
            lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
            last = lines[-1].strip() if lines else f"status {child.returncode}"
            raise ConfigError(f"SGLang does not take these arguments: {last}") from error


@contextlib.contextmanager
def _ending(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
