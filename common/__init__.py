"""Measuring and checking, shared by all projects: no model code."""
