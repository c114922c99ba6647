"""Checkpoints: everything a graph holds, written so that a power cut leaves the last complete one.

`files` stores and verifies directories, `codec` turns settings into JSON and back, `graph_json` describes graphs,
`saving` and `restoring` combine them, `restore_report` shows what matched. No code from a file runs: no pickle, no
imports.
"""
