"""One module for each step. The function `task` of a module describes a job.

All steps use the same names for files and settings. The step's rule says which it gets.

    record              source.receipt.json. The checkpoint's files lie beside the record, see `task.source_folder`.
    summary             plan.json.
    part, parts         parts/P.json of the job's part, or of every part in the order of a pass.
    recipe              precision.json, the form of each matrix.
    text, calibration   the text that the config names. A list is empty if the config names no text.
    edges, costs        what the steps calibration and sensitivity make.
    codes               what the step codes makes for the part, or for every part. Empty without calibration.
    chosen              what the step search makes. Empty without a search.
    states              what the step reference makes. For the step measured, what the step original makes.
    package, bundle     the .mlpackage and the .mlmodelc of the part. In the plural, of every part.
    table, manifest     embedding.safetensors, model.json.
    verdicts, receipts  the verdicts of all gates, and the receipts of all steps up to the gates.
    settings            the config, or the section that the step follows, as plain data.
    form                the config's `convert.embedding`.
    reshape             the config's `program.reshape_frequency`.
    engine, runtime     the engine that loads programs here, and the Core AI runtime that is installed here.

A job adds what a function asks for besides:

    tools               the versions of the step's code and packages, which also decide the result.
    threads             the number of threads that the job may start.
    hashes              the cache of file hashes.
    before_change       a function to be called before files of a finished build change.
    templates           a folder for conversions that all parts share.
"""
