"""The planner serves the collective backend as it serves the pull."""

from support.models import Models
from support.planner import Planner
from support.server import Fleet

COMMAND = ("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "nccl")


def test_the_same_command_reads_the_disk_first_and_forks_over_a_group_next(
    fleet: Fleet, planner: Planner, models: Models
) -> None:
    first = fleet.start(models.path("qwen3"), *COMMAND, env=planner.env())
    second = fleet.start(models.path("qwen3"), *COMMAND, env=planner.env())
    disk, fork = (server.get("/rfork/v1/status").json()["weights"] for server in (first, second))
    assert (disk["source"], disk["fallback_reason"]) == ("checkpoint", "elected")
    assert (fork["source"], fork["protocol"], fork["verify"]) == ("seed", "gloo", "full")
    assert first.generate() == second.generate()
