"""Stands in front of the package rfc3987_syntax in training processes, and is not there.

jsonschema imports that package if it is installed (JupyterLab brings it) to check IRIs, which no training process does.
Importing it builds a grammar for three to four seconds of processor time, in every one of Ray's processes.
"""

raise ImportError("recipes.cpu.absent leaves rfc3987_syntax out of training processes")
