"""`rfork demo`: four real servers on this machine, forks of each other, and proof that their weights are equal.

model.py      a checkpoint with random weights, made here in seconds
processes.py  a process group that ends with us, however we end
server.py     one SGLang server: start, wait, ask
facts.py      what was seen, and the checks on it
story.py      the order of events
screen.py     what the user sees meanwhile, and the table at the end
"""
