"""`kvlab bench kernels`: decode attention by kernels, layout by layout: right first, then how near to the memory's speed.

`setting.py` says what is measured, `cases.py` and `peers.py` how a case is built, `program.py` what is timed, `exact.py` what is
right, `group.py` and `run.py` the order of things, `figures.py` and `picture.py` what is made of them.
"""
