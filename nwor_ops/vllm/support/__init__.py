"""Supported and refused configurations, as data.

- ``features``: what each feature supports.
- ``connectors``: the time at which each KV connector reads, and the data that it reads.
- ``refusals``: the refused configurations, with the reasons.
"""
