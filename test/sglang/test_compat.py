"""The table of private SGLang names: it holds for the release that is installed, and it says so when it does not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_rfork.srt import compat
from sglang_rfork.srt.compat import FIRST, LAST, Role, Target, UnsupportedSGLang, table_for

RELEASES = [f"0.5.{patch}" for patch in range(FIRST, LAST + 1)]


@pytest.mark.parametrize("role", list(Role))
def test_every_name_of_the_installed_release_is_there_and_takes_what_the_plugin_passes(role: Role) -> None:
    assert compat.installed_release().problems(role) == []


def test_the_installed_release_is_the_one_that_pip_names() -> None:
    assert compat.installed_release().version == importlib.metadata.version("sglang")


def test_reading_the_table_imports_nothing_of_sglang() -> None:
    code = (
        "import sys; from sglang_rfork.srt import compat; compat.table_for('0.5.23'); "
        "sys.exit(any(name.partition('.')[0] in ('sglang', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("version", ["0.5.15", "0.5.15.post3", "0.5.24", "0.5.160", "0.4.23", "0.6.0", "1.0", "main"])
def test_an_unsupported_release_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedSGLang) as caught:
        table_for(version)
    assert str(caught.value) == f"SGLang {version} is installed; this R-Fork supports sglang>=0.5.16,<0.5.24"


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16.post1", "0.5.23", "0.5.23+cu130"])
def test_a_supported_release_is_told_by_its_patch_number(version: str) -> None:
    assert table_for(version).version == version


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_one_row_per_purpose(version: str) -> None:
    purposes = [target.purpose for target in table_for(version).targets]
    assert sorted(set(purposes)) == sorted(purposes)


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_has_one_way_to_take_over_the_load_format(version: str) -> None:
    ways = [t.purpose for t in table_for(version).targets if t.purpose.startswith("arguments.load_format.")]
    assert len(ways) == 1


@pytest.mark.parametrize("version", RELEASES)
def test_every_way_of_changing_weights_is_fenced(version: str) -> None:
    """Updates in several calls got a beginning and an end in 0.5.21; everything else was there before."""
    found = {t.purpose for t in table_for(version).targets if t.purpose.startswith(("fence.", "update."))}
    requests = {f"update.{name}" for name in ("disk", "tensor", "ipc", "distributed", "release", "resume")}
    calls = {f"fence.{name}" for name in ("disk", "tensor", "ipc", "distributed", "reset")}
    experts = {"fence.experts", "fence.backup"}
    sessions = {"update.begin", "update.end", "fence.begin", "fence.end"}
    is_new = int(version.rpartition(".")[2]) >= 21
    newest = sessions if is_new else {"update.continue"}
    assert found - {"update.version", "update.label"} == requests | calls | experts | newest


GOOD = Target("http.auth", "utils.auth:auth_level", (Role.MAIN,), ("level",))


def test_a_row_that_holds_has_no_problem() -> None:
    assert GOOD.problem() is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "utils.auth:gone"}, "sglang.srt.utils.auth.gone (http.auth) is not there: AttributeError"),
        ({"path": "utils.gone:auth_level"}, "is not there: ModuleNotFoundError"),
        ({"parameters": ("app", "level")}, "should take (app, level), but takes (level)"),
        ({"path": "utils.auth:AuthLevel.NORMAL"}, "should be a function, but is AuthLevel"),
    ],
)
def test_a_row_that_does_not_hold_says_what_was_expected(change: dict[str, object], says: str) -> None:
    assert says in (dataclasses.replace(GOOD, **change).problem() or "")


def test_parameters_must_come_in_the_order_in_which_the_plugin_passes_them() -> None:
    target = Target(
        "http.run", "entrypoints.http_server:_wait_and_warmup", (Role.MAIN,), ("launch_callback", "server_args")
    )
    assert "should take (launch_callback, server_args)" in (target.problem() or "")


def test_a_wrapped_function_is_checked_by_what_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor and the strict check see the same after the hooks are applied."""
    import functools

    from sglang.srt.utils import auth

    @functools.wraps(auth.auth_level)
    def hook(*args: object, **kwargs: object) -> object:
        return None

    monkeypatch.setattr(auth, "auth_level", hook)
    assert GOOD.problem() is None


def test_a_role_without_work_has_no_rows() -> None:
    assert table_for("0.5.23").for_role("other") == ()


def test_layout_fields_are_arguments_of_sglang() -> None:
    """What the newest release lacks was dropped on the way to it."""
    if not compat.installed_release().version.startswith(f"0.5.{LAST}"):
        pytest.skip("older releases lack what was added later")
    from sglang.srt.server_args import ServerArgs

    missing = [name for name in compat.LAYOUT_FIELDS if not hasattr(ServerArgs, name)]
    assert missing == ["torchao_config"]


def test_variables_that_choose_a_layout_are_told_from_the_others() -> None:
    layout = {"SGLANG_MOE_PADDING": "1", "SGLANG_USE_AITER": "0", "SGL_USE_DEEPGEMM_BMM": "1", "AITER_FORCE_A8W4": "1"}
    others = {"SGLANG_PLUGINS": "rfork", "SGLANG_DG_CACHE_DIR": "/x", "SGLANG_HOST_IP": "::1", "MOE": "1", "HOME": "/"}
    assert compat.layout_environment({**others, **layout}) == dict(sorted(layout.items()))


def runner(name: str) -> SimpleNamespace:
    return SimpleNamespace(model_runner=name)


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (None, []),
        (SimpleNamespace(draft_worker=None), []),
        (SimpleNamespace(draft_worker=runner("d")), [("draft-0", "d")]),
        (SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=["d", "e"])), [("draft-0", "d"), ("draft-1", "e")]),
    ],
    ids=["no speculation", "n-gram", "one plain worker", "multi-layer"],
)
def test_drafts_of_older_releases_are_found_behind_the_draft_worker(draft: object, expected: list[object]) -> None:
    scheduler = SimpleNamespace(tp_worker=runner("t"), draft_worker=draft)
    assert table_for("0.5.16").runners(scheduler) == [("target", "t"), *expected]


def test_drafts_of_newer_releases_are_what_weight_updates_reach() -> None:
    draft = SimpleNamespace(weight_update_runners=lambda: [("draft_step_0", "d"), ("draft_step_1", "e")])
    scheduler = SimpleNamespace(tp_worker=runner("t"), draft_worker=draft)
    assert table_for("0.5.23").runners(scheduler) == [("target", "t"), ("draft-0", "d"), ("draft-1", "e")]


@pytest.mark.parametrize(
    ("dp_rank", "dp_size", "attn_dp_size", "expected"),
    [(None, 1, 1, (0, 1)), (1, 2, 1, (1, 2)), (1, 2, 2, (0, 1))],
    ids=["alone", "plain data parallelism", "attention data parallelism"],
)
def test_only_plain_data_parallelism_makes_replicas(
    dp_rank: int | None, dp_size: int, attn_dp_size: int, expected: tuple[int, int]
) -> None:
    ps = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, attn_dp_size=attn_dp_size, gpu_id=3)
    placement = table_for("0.5.16").placement(SimpleNamespace(ps=ps))
    assert (placement.replica, placement.num_replicas, placement.device_index) == (*expected, 3)
