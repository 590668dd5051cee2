"""The command line.

app              registers the verbs; verbs: their arguments and options; options: how these are defined and checked
run, validate, report, inspect, status, publish, fit, recipes
                 a file per verb
needs            what a calibration or an evaluation needs, and what a calibration found
views            plans and runs
console          stdout and stderr; progress: bars and progress lines
interrupts       Ctrl-C and SIGTERM
"""
