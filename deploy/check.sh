#!/bin/sh
# Checks the Prometheus files with promtool, which needs Prometheus installed: syntax, then that each
# alert fires on its fault and on nothing else. `make check` has no part in it.
set -eu
cd "$(dirname "$0")/prometheus"
promtool check config prometheus.yml
promtool test rules gyre.test.yml
