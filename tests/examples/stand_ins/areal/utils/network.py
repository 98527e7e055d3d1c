"""Addresses."""

from __future__ import annotations


def format_hostport(host: str, port: int) -> str:
    return f"{host}:{port}"
