import Foundation

/// One program of a model.
package struct Part: Sendable {
    /// What a part holds.
    package enum Kind: String, Decodable, Sendable {
        /// Layers.
        case layers
        /// Some experts of a layer.
        case experts
        /// Some rows of the LM head.
        case head
        /// An encoder for one bucket, or some of its layers.
        case encoder
        /// What makes one row of the taps that a drafter reads.
        case fuse
        /// What makes an assistant's first row from a token and a hidden state of the model.
        case join
        /// What makes an MTP layer's row from a token and a hidden state, the model's or the layer's own.
        case mtp
    }

    /// Functions by width, and the shapes of inputs and states, at one context length.
    package struct Length: Sendable {
        /// The name of the function for each width.
        package let functions: [Int: String]
        /// The shapes of the inputs.
        package let inputs: [String: [Extent]]
        /// The shapes of the states.
        package let states: [String: [Int]]
    }

    /// An extent of a shape: a number, or T, the tokens of a pass.
    package enum Extent: Equatable, Sendable {
        /// A number.
        case fixed(Int)
        /// T.
        case tokens
    }

    /// The part's name.
    package let name: String
    /// What the part holds.
    package let kind: Kind
    /// The first layer, expert or row of the vocabulary.
    package let start: Int
    /// The layer, expert or row after the last.
    package let end: Int
    /// The shapes of the inputs.
    package let inputs: [String: [Extent]]
    /// The shapes of the states.
    package let states: [String: [Int]]
    /// For each cache that the host keeps, by the name of its input, the output with the rows that a pass adds.
    package let written: [String: String]
    /// Outputs that a drafter reads, each with the layer whose input it is.
    package let taps: [String: Int]
    /// The inputs that are caches which the host keeps for earlier parts, or for the model of an assistant.
    package let lent: Set<String>
    /// The inputs that hold an adapter's matrices; zeros without an adapter.
    package let adapters: Set<String>
    /// The name of the function for each width; empty if one function accepts every width up to `tokens_max`.
    package let functions: [Int: String]
    /// The lengths by number of slots; empty if all passes use `functions`.
    package let lengths: [Int: Length]
    /// The compiled bundle, or a folder with a bundle for each function.
    package let program: URL
    /// The compiled bundle of each function, if each has one of its own.
    package let bundles: [String: URL]
    /// The engine whose compiler made the bundle: "coreml" with the version and build of the system, or "portable".
    package let compiler: [String: String]
    /// The bytes of the program's files; nil in builds that were made before the key was added.
    package let bytes: Int?

    init(_ raw: RawPart, folder: URL) throws {
        name = raw.name
        guard let known = Kind(rawValue: raw.kind) else {
            let kind = "\(raw.name.prefix(40)) is of the kind '\(raw.kind.prefix(40))'"
            throw ShardmillError(.build, "model.json: \(kind), which this version can't run")
        }
        kind = known
        start = raw.start
        end = raw.end
        inputs = raw.inputs
        states = raw.states
        written = raw.written ?? [:]
        taps = raw.taps ?? [:]
        lent = Set(raw.lent ?? [])
        adapters = Set((raw.adapters ?? [:]).keys)
        functions = try Self.byNumber(raw.functions ?? [:], raw.name)
        program = try Manifest.inside(folder, raw.program.path)
        bundles = try (raw.program.bundles ?? [:]).mapValues { try Manifest.inside(folder, $0) }
        compiler = raw.program.compiler ?? [:]
        bytes = raw.program.bytes
        var found: [Int: Length] = [:]
        for (slots, shorter) in try Self.byNumber(raw.contexts ?? [:], raw.name) {
            found[slots] = Length(
                functions: try Self.byNumber(shorter.functions, raw.name),
                inputs: raw.inputs.merging(shorter.inputs ?? [:]) { $1 },
                states: raw.states.merging(shorter.states ?? [:]) { $1 })
        }
        lengths = found
    }

    private static func byNumber<Value>(_ named: [String: Value], _ part: String) throws -> [Int: Value] {
        var found: [Int: Value] = [:]
        for (key, value) in named {
            guard let number = Int(key), number > 0, number < 1 << 24 else {
                let place = "'\(key.prefix(40))' of \(part.prefix(40))"
                throw ShardmillError(.build, "model.json: \(place) is not a number of tokens or slots")
            }
            found[number] = value
        }
        return found
    }

    /// Return the functions and shapes at a context length.
    func length(_ slots: Int) -> Length {
        lengths[slots] ?? Length(functions: functions, inputs: inputs, states: states)
    }

    /// Return the layer whose row for each token an input is; nil for another input.
    static func layer(ofRow input: String) -> Int? {
        input.hasPrefix("p_") ? Int(input.dropFirst(2)).flatMap { (0..<1 << 16).contains($0) ? $0 : nil } : nil
    }

    /// Return the token axis of each input; inputs without one (caches) are left out.
    var tokenAxes: [String: Int] {
        inputs.compactMapValues { $0.firstIndex(of: .tokens) }
    }

    /// Check what the types can't say.
    ///
    /// - Parameters:
    ///   - manifest: the model that the part belongs to.
    ///   - lenders: parts whose caches the part reads, as inputs of the same names.
    func check(_ manifest: Manifest, lenders: [Part] = []) throws {
        func refuse(_ reason: String) -> ShardmillError { ShardmillError(.build, "model.json: \(name): \(reason)") }
        let shapes = inputs.values.map { $0 } + lengths.values.flatMap { $0.inputs.values }
        let extents = shapes.flatMap { $0 } + states.values.flatMap { $0.map(Extent.fixed) }
        for case .fixed(let extent) in extents where !(1...1 << 24).contains(extent) {
            throw refuse("an extent is \(extent)")
        }
        if start < 0 || end <= start || end > 1 << 24 { throw refuse("it ranges from \(start) to \(end)") }
        if Set(lengths.keys) != Set(lengths.isEmpty ? [] : manifest.contexts) {
            throw refuse("its contexts are others")
        }
        if !lengths.isEmpty && functions.isEmpty { throw refuse("it has contexts but no functions") }
        if written.values.contains("") { throw refuse("an output has no name") }
        let needed = kind == .experts ? ["x", "weights"] : kind == .head ? ["hidden"] : ["x"]
        for input in needed where inputs[input] == nil { throw refuse("it has no \(input)") }
        for state in states.values where state.count != 4 { throw refuse("a state has \(state.count) extents") }
        if inputs["attn_mask_sliding"] != nil && manifest.window == nil {
            throw refuse("it slides, but window is null")
        }
        if inputs["recurrent_keep_mask"] != nil && manifest.recurrence == nil {
            throw refuse("it has a recurrence, but recurrent is missing")
        }
        if inputs["conv_read_mask"] != nil && manifest.convTaps < 2 {
            throw refuse("it has convolutions, but conv_taps is small")
        }
        for slots in [manifest.context] + lengths.keys {
            var own = length(slots).inputs
            for lender in lenders {
                let caches = lender.length(slots).inputs
                for name in lender.written.keys where own[name] != nil && own[name] == caches[name] { own[name] = nil }
            }
            try checkInputs(own, slots: slots, manifest)
        }
    }

    /// Check that every input has the shape that the host gives it at a length of `slots` slots.
    private func checkInputs(_ inputs: [String: [Extent]], slots: Int, _ manifest: Manifest) throws {
        func refuse(_ input: String, _ reason: String) -> ShardmillError {
            ShardmillError(.build, "model.json: \(name.prefix(40)): the input '\(input.prefix(40))' \(reason)")
        }
        func half(_ table: String) -> Extent { .fixed(manifest.rope[table]?.inv_freq.count ?? 0) }
        let one = Extent.fixed(1), whole = Extent.fixed(slots), taps = Extent.fixed(manifest.convTaps - 1)
        let ring = manifest.windowSlots == 0 ? whole : .fixed(manifest.windowSlots), conv = Extent.fixed(convRing)
        let block = manifest.recurrence?.block ?? 0
        let known: [String: [Extent?]] = [  // nil: any number
            "x": [one, nil, .tokens, one], "hidden": [one, nil, .tokens, one],
            "weights": [one, .fixed(end - start), .tokens, one],
            "rope_cos": [.tokens, half("rope")], "rope_sin": [.tokens, half("rope")],
            "rope_cos_local": [.tokens, half("rope_local")], "rope_sin_local": [.tokens, half("rope_local")],
            "attn_mask": [one, one, .tokens, whole], "attn_mask_sliding": [one, one, .tokens, ring],
            "kv_write_mask": [one, one, whole, .tokens], "kv_write_mask_sliding": [one, one, ring, .tokens],
            "conv_write_mask": [one, one, .tokens, conv], "conv_read_mask": [one, taps, conv, .tokens],
            "recurrent_read_mask": [one, .fixed(2 * (block + (manifest.recurrence?.taps ?? 1) - 1)), conv, .tokens],
            "recurrent_out_mask": [one, one, .tokens, .fixed(block)], "recurrent_keep_mask": [one, one, one, .tokens],
            "embedded": [one, nil, .tokens, one],
        ]
        for (input, shape) in inputs where written[input] == nil && !adapters.contains(input) {
            let row: [Extent?]? = Self.layer(ofRow: input) == nil ? nil : [one, nil, .tokens, one]
            guard let expected = known[input] ?? row else { throw refuse(input, "is unknown to this version") }
            let fits = zip(shape, expected).allSatisfy { $1 == nil ? $0 != .tokens : $0 == $1 }
            if shape.count != expected.count || !fits {
                throw refuse(input, "has another shape than model.json implies")
            }
        }
        for input in adapters.union(written.keys) {
            guard let shape = inputs[input], shape.count == 4, !shape.contains(.tokens) else {
                throw refuse(input, "has not the shape of a cache or of matrices")
            }
            // Beyond any model; more would only exhaust the memory.
            let elements = shape.reduce(1.0) { $0 * Double($1.count(tokens: 1)) }
            if elements > 0x1p31 { throw refuse(input, "has \(elements) elements") }
        }
    }
}
