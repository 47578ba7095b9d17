/// One part's program with its states, at any of its context lengths.
///
/// Each width of a pass may have a function of its own; then a pass is padded to the next width. The states may be the
/// program's, or caches that the host keeps, passes in and writes.
final class Program {
    let part: Part
    /// The current number of slots; 0 if all passes use the same functions.
    private(set) var slots: Int
    private let backend: any Backend
    private let axes: [String: Int]
    private var loaded: [String: any LoadedFunction] = [:]
    private var state: (any ProgramState)?
    private var buffers: [BufferKey: any Buffer] = [:]
    /// The caches that the host keeps, by input.
    private(set) var caches: [String: any Buffer] = [:]
    /// The inputs with an adapter's matrices.
    private var adapter: [String: any Buffer] = [:]
    /// The outputs of the last run that a drafter reads, by the layer whose input they are; valid until the next run.
    private(set) var tapped: [Int: any Buffer] = [:]

    private struct BufferKey: Hashable {
        let function: String
        let input: String
        let shape: [Int]
    }

    /// Load the program at the shortest of its lengths.
    init(_ part: Part, backend: any Backend) throws {
        self.part = part
        self.backend = backend
        axes = part.tokenAxes
        slots = part.lengths.keys.min() ?? 0
        state = try loadFunctions(slots)
        caches = try makeCaches(slots)
        for input in part.adapters {
            let shape = part.inputs[input]!.map { $0.count(tokens: 1) }
            adapter[input] = try loaded[names(slots)[0]]!.makeBuffer(input, shape: shape)
        }
    }

    private func names(_ slots: Int) -> [String] {
        let functions = part.length(slots).functions
        return functions.isEmpty ? [""] : Set(functions.values).sorted()
    }

    /// Load what a length needs; return zeroed states that its functions share.
    private func loadFunctions(_ slots: Int) throws -> (any ProgramState)? {
        for name in names(slots) where loaded[name] == nil { loaded[name] = try backend.load(part, function: name) }
        return part.states.isEmpty ? nil : try loaded[names(slots)[0]]!.makeState()
    }

    private func makeCaches(_ slots: Int) throws -> [String: any Buffer] {
        var found: [String: any Buffer] = [:]
        for (name, shape) in cacheShapes(slots) {
            found[name] = try loaded[names(slots)[0]]!.makeBuffer(name, shape: shape)
        }
        return found
    }

    private func cacheShapes(_ slots: Int) -> [String: [Int]] {
        let inputs = part.length(slots).inputs
        return part.written.reduce(into: [:]) { found, item in
            found[item.key] = inputs[item.key]!.map { $0.count(tokens: 1) }
        }
    }

    /// Return whether passes differ by length; other programs ignore `move`.
    var hasLengths: Bool { !part.lengths.isEmpty }

    /// Move to another length. States or caches are copied as far as both reach, unless their contents are not needed.
    ///
    /// - Throws: if the functions of that length can't be loaded; the program then stays at its length.
    func move(to slots: Int, keep: Bool) throws {
        let target = part.lengths[slots] == nil ? 0 : slots
        if !hasLengths || target == self.slots { return }
        let newState = try loadFunctions(target)
        let newCaches = try makeCaches(target)
        if keep {
            if let state, let newState {
                for (name, shape) in part.length(target).states {
                    var array = HostArray(zeros: shape)
                    array.carry(from: try state.read(name))
                    try newState.write(name, array)
                }
            }
            for (name, cache) in newCaches {
                var array = HostArray(zeros: cache.shape)
                array.carry(from: HostArray(shape: caches[name]!.shape, values: try caches[name]!.read()))
                try cache.write(array.values)
            }
        }
        state = newState
        caches = newCaches
        self.slots = target
    }

    /// Replace the states and caches with zeros.
    func renew() throws {
        state = part.states.isEmpty ? nil : try loaded[names(slots)[0]]!.makeState()
        caches = try makeCaches(slots)
    }

    /// Take an adapter's matrices, by input; zeros into inputs that have none.
    func adapt(_ matrices: [String: HostArray]) throws {
        for (input, buffer) in adapter { try buffer.write((matrices[input] ?? HostArray(zeros: buffer.shape)).values) }
    }

    /// Run a pass and return its output [1, channels, T, 1]; the rows of caches are written into the host's caches.
    ///
    /// - Parameters:
    ///   - given: arrays of the pass; those that are no inputs of this program are ignored.
    ///   - tokens: T.
    ///   - lent: caches of other programs, by input.
    func run(_ given: [String: HostArray], tokens: Int, lent: [String: any Buffer] = [:]) throws -> HostArray {
        let result = try output(given, tokens: tokens, lent: lent)
        return HostArray(shape: result.shape, values: try result.read()).firstTokens(tokens)
    }

    /// Run a pass and return its output where it lies, valid until the next run. It may have more tokens than the pass.
    func output(_ given: [String: HostArray], tokens: Int, lent: [String: any Buffer] = [:]) throws -> any Buffer {
        let (function, width) = try choose(tokens)
        var inputs = caches.merging(adapter) { $1 }.merging(lent.filter { part.inputs[$0.key] != nil }) { $1 }
        for name in part.inputs.keys where inputs[name] == nil {
            guard let array = given[name] else { throw ShardmillError(.program, "\(part.name) needs \(name)") }
            let padded = axes[name].map { array.padded(axis: $0, to: width, withZeros: padsWithZeros(name)) } ?? array
            let key = BufferKey(function: function, input: name, shape: padded.shape)
            if buffers[key] == nil { buffers[key] = try loaded[function]!.makeBuffer(name, shape: padded.shape) }
            try buffers[key]!.write(padded.values)
            inputs[name] = buffers[key]!
        }
        let outputs = try loaded[function]!.run(inputs, state: state)
        for (cache, output) in part.written {
            guard let rows = outputs[output] else {
                throw ShardmillError(.program, "\(part.name) has no output \(output)")
            }
            try writeRows(rows, into: caches[cache]!, of: cache, given)
        }
        tapped = [:]
        for (output, layer) in part.taps { tapped[layer] = outputs[output] }
        let others = Set(part.written.values).union(part.taps.keys)
        guard let (_, result) = outputs.first(where: { !others.contains($0.key) }) else {
            throw ShardmillError(.program, "\(part.name) has no output")
        }
        if result.shape.count != 4 || result.shape[2] < tokens {
            throw ShardmillError(.program, "\(part.name): an output has the shape \(result.shape)")
        }
        return result
    }

    /// Return the function for a pass, and the width that the pass is padded to.
    private func choose(_ tokens: Int) throws -> (String, Int) {
        let functions = part.length(slots).functions
        if functions.isEmpty { return ("", tokens) }
        guard let width = functions.keys.filter({ $0 >= tokens }).min() else {
            throw ShardmillError(
                .request, "a pass of \(tokens) tokens: \(part.name) takes \(functions.keys.max()!) at most")
        }
        return (functions[width]!, width)
    }

    /// Write a pass's new rows into the slots that its masks name; rows of padding are left out.
    private func writeRows(
        _ rows: any Buffer, into cache: any Buffer, of name: String, _ given: [String: HostArray]
    ) throws {
        let values = try rows.read()
        let shape = cache.shape
        if name.hasPrefix("s_") {  // a recurrence's state, new as a whole
            if rows.shape != shape { throw ShardmillError(.program, "\(part.name): \(name) is now \(rows.shape)") }
            return try cache.write(values)
        }
        if name.hasPrefix("c_") {  // [1, 1, channels, R]: a token's row goes into one slot of every channel
            let slots = slotsByRow(given["conv_write_mask"]!)
            let width = rows.shape[3]
            for channel in 0..<shape[1] * shape[2] {
                for case (let t, let slot?) in slots.enumerated() {  // a recurrence's ring does not get every token
                    try cache.write(
                        values[channel * width + t..<channel * width + t + 1], at: channel * shape[3] + slot)
                }
            }
            return
        }
        let masks = ["kv_write_mask", "kv_write_mask_sliding"].compactMap { given[$0] }
        guard let mask = masks.first(where: { $0.shape[2] == shape[2] }) else {
            throw ShardmillError(.program, "\(part.name): no mask has the \(shape[2]) slots of \(name)")
        }
        let slots = slotsByColumn(mask)
        let (width, inner) = (rows.shape[2], shape[3])
        for head in 0..<shape[1] {
            for (t, slot) in slots.enumerated() {
                let from = (head * width + t) * inner
                try cache.write(values[from..<from + inner], at: (head * shape[2] + slot) * inner)
            }
        }
    }
}

/// Return whether an input is 0 for added tokens: it says what is written, or programs sum it over the tokens.
private func padsWithZeros(_ name: String) -> Bool {
    ["kv_write_mask", "conv_write_mask", "recurrent_"].contains { name.hasPrefix($0) }
}

/// Return the slot of each token of a mask [1, 1, T, R]; nil if it is written nowhere.
private func slotsByRow(_ mask: HostArray) -> [Int?] {
    (0..<mask.shape[2]).map { t in (0..<mask.shape[3]).first { mask.values[t * mask.shape[3] + $0] == 1 } }
}

/// Return the slot of each token of a mask [1, 1, S, T].
private func slotsByColumn(_ mask: HostArray) -> [Int] {
    let count = mask.shape[3]
    var found = [Int](repeating: 0, count: count)
    for (place, value) in mask.values.enumerated() where value == 1 { found[place % count] = place / count }
    return found
}
