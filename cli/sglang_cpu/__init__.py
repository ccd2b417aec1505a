"""The real SGLang on a CPU: a recipe for its environment, and its workers as a part of a fleet. For the demo and for tests."""
