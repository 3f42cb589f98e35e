"""Thin adapters to training frameworks; each module needs its framework, nothing else does."""
