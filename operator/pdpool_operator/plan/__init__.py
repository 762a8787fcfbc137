"""Planners: from the observed and the desired state to the next safe actions. Pure: a plan is data, the runtime carries
it out.
"""
