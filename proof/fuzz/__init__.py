"""`make fuzz`: coverage-guided fuzzing (atheris) of every decoder, and of the machines driven by inputs that decode."""
