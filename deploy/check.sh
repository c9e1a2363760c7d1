#!/bin/sh
# Checks the Prometheus files with promtool, which needs Prometheus installed: syntax, then that each
# alert fires on its fault and on nothing else. tests/system/test_prometheus.py runs it.
set -eu
cd "$(dirname "$0")/prometheus"
promtool check config prometheus.yml
promtool check rules gyre.rules.yml
promtool test rules gyre.test.yml
