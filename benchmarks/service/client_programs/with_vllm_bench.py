"""`vllm bench serve`, from its module: the command itself asks for a package of the name `vllm`, and the build for CPUs
has another one."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
