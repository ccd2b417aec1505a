"""The benchmark: every policy on every workload and testbed, judged the same way. Simulated throughout."""
