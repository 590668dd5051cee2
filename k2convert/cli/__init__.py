"""The command line.

app              registers the verbs, turns errors into exit codes
run, evaluate, validate, fit, prune, report, publish, inspect (with status), guide (with recipes)
                 a function per verb: its arguments, options and steps
options          arguments and options that verbs share, and their checks
job_view, evaluation_view, validation_view, fit_view, status_view
                 results as tables and lines
needs            what a calibration or an evaluation needs, and what a calibration found
console          stdout and stderr; progress: bars and progress lines
interrupts       Ctrl-C and SIGTERM
"""
