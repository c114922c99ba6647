"""Checkpoints: what a graph holds, written so that a power cut leaves the last complete one.

`files` stores and verifies directories, `codec` turns settings into JSON and back, `structure` describes graphs,
`saving` and `restoring` join them, `report` tells what fitted. None of it runs code from a file: no pickle, no imports.
"""
