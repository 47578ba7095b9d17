extension Backend {
    /// Run every function of a part once, one after the other, so that the system specialises it and keeps the result.
    ///
    /// Inputs are zeros, and states are made for the run; nothing stays loaded. It takes minutes on a device that has
    /// not run the part yet.
    ///
    /// - Parameters:
    ///   - part: the part's entry in model.json.
    ///   - widths: numbers of tokens of passes; only used if one function takes all of them.
    ///   - check: called before each run; it may throw to stop.
    package func specialise(_ part: Part, widths: [Int], check: () throws -> Void = {}) throws {
        for slots in part.lengths.keys.sorted() + [0] {
            let length = part.length(slots)
            let passes =
                length.functions.isEmpty ? widths.map { ($0, "") } : length.functions.sorted { $0.key < $1.key }
            for (name, group) in Dictionary(grouping: passes, by: \.1).sorted(by: { $0.key < $1.key }) {
                try check()
                let function = try load(part, function: name)
                let state = length.states.isEmpty ? nil : try function.makeState()
                for (width, _) in group {
                    try check()
                    var inputs: [String: any Buffer] = [:]
                    for (input, shape) in length.inputs {
                        inputs[input] = try function.makeBuffer(input, shape: shape.map { $0.count(tokens: width) })
                    }
                    _ = try function.run(inputs, state: state)
                }
            }
        }
    }
}

extension Part.Extent {
    /// Return the extent in a pass of `tokens` tokens.
    package func count(tokens: Int) -> Int {
        switch self {
        case .fixed(let number): number
        case .tokens: tokens
        }
    }
}
