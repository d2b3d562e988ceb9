"""A client process that gets its answer, says which, and goes on living until somebody kills it.

python doomed.py NAME INSTANCE_KEY PLANNER_URL…
"""

from __future__ import annotations

import sys
import time

from rfork.planner.client import PlannerClient
from rfork.planner.heartbeat import Heartbeater
from rfork.planner.seek import seek
from rfork.wire.planner import Ask, Heartbeat, InstanceState, ReadDisk


def main(name: str, key: str, *urls: str) -> None:
    planner = PlannerClient(urls)
    beat = {"reads_disk": False}
    beater = Heartbeater(
        planner, lambda: Heartbeat(instance_id=name, instance_key=key, state=InstanceState.STARTING, **beat)
    )
    beater.start()
    answer = seek(planner, Ask(client=name, instance_key=key), poll_s=2.0)
    beat["reads_disk"] = isinstance(answer, ReadDisk)
    print(type(answer).__name__, flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
