"""`Filter` plug-ins that ship with the dataflow server, named `astraflow_dataflow.filters.<module>:<Name>`
in a recipe.
"""
