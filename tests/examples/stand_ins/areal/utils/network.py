"""Addresses."""

from __future__ import annotations


def gethostip(probe_host: str = "8.8.8.8", probe_port: int = 80) -> str:
    return "127.0.0.1"


def format_hostport(host: str, port: int) -> str:
    return f"{host}:{port}"
