"""The planner: it chooses seeds for clients; seeds admit. Its state is soft and its loss stops nothing.

`state` is the pure core (event in, effects out), `service` gives it time, waiting clients and a store, `app` is
the HTTP shell, `legacy` speaks vLLM-Ascend RFork's header protocol, `client` is what instances use, `seek` asks
with it for a seed and `heartbeat` keeps an instance registered.
"""
