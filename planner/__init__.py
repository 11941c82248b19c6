"""Chooses how to train: cuts the graph, walks over plans, simulates them, explains the choice."""

from planner.search import find_plan

__all__ = ["find_plan"]
