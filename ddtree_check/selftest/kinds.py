"""The kinds of faults that the self-test injects, by the names that its --kind takes."""

KINDS = {
    "K1": "rollback or commit missing",
    "K2": "wrong commit index",
    "K3": "branch leakage",
    "K4": "convolution window",
    "K5": "attention geometry",
    "K6": "capacity",
    "K7": "static graph, stale metadata",
    "K8": "rows or requests mixed",
    "K9": "carried state lost",
    "K10": "padding pollution",
    "K11": "numerics, explained",
    "K12": "selection",
    "K13": "report or artefact",
    "N": "not a fault of verify",
    "S": "sensitivity",
}
