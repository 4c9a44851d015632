#!/bin/sh
# The base image's start-up script has this place. It prints its banner, then runs the command.
printf '\n=============\n== PyTorch ==\n=============\n\nNVIDIA Release 26.07 (stand-in)\n\n'
exec "$@"
