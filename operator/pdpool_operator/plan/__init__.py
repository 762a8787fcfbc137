"""Planners: from what is observed and what is wanted to the next safe actions. Pure: a plan is data, the runtime
carries it out.
"""
