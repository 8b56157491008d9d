"""Supported and refused configurations, as data.

- ``features``: what each feature supports.
- ``connectors``: when and what each KV connector reads.
- ``refusals``: what is refused, with the reasons.
"""
