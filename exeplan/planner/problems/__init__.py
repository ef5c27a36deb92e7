"""What is planned: a model on GPUs under bounds, how a pipeline may be placed there, and what a replay says of
a schedule.
"""
