"""`rfork doctor`: look at this environment for all that a fork needs.

finding.py   what a probe found, and what to do about it
probes/      one module for each subject; each returns findings and never asks a user anything
bounded.py   runs a probe in a child process, with a deadline: a probe may crash or hang, the doctor does not
checkup.py   the list of probes, in the order in which they are shown
"""
