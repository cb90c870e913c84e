"""The microkernel: lanes, cohorts, step coroutines, instruments. Standard library only."""
