import Foundation

/// model.json of a decoder's build, format 2. docs/model-json.md in the repository explains every key.
public struct Manifest: Sendable {
    public let model: String
    /// S, the number of key/value slots.
    public let context: Int
    /// Numbers of slots that programs also have functions for, ascending, without `context`.
    public let contexts: [Int]
    public let tokensMax: Int
    public let widths: [Int]
    /// The most tokens of a decode pass, the pending token and its drafts.
    public let verify: Int
    /// Two tokens whose logits are closer than this may change places with the width of a pass.
    public let margin: Double
    public let reshapeFrequency: String
    public let vocab: Int
    public let eos: [Int]
    public let rope: [String: RopeTable]
    public let window: Int?
    public let windowSlots: Int
    public let convTaps: Int
    public let embedding: URL
    public let tokenizer: URL
    public let parts: [Part]
    /// The package that each part's program was compiled from, by the part's name.
    public let packages: [String: URL]
    /// How a conversation becomes text; nil if the build says nothing of it, or no plain form could be proven.
    public let chat: ChatFormat?
    public let folder: URL

    /// All context lengths, ascending; the last is the whole context.
    public var lengths: [Int] { contexts + [context] }

    /// Read a build's model.json.
    ///
    /// - Throws: `ShardmillError` of kind `build` that names the key, if the file is missing, damaged, of another format,
    ///   or contradicts itself.
    public init(folder: URL) throws {
        let file = folder.appendingPathComponent("model.json")
        guard let data = try? Data(contentsOf: file) else {
            throw ShardmillError(.build, "\(file.path) can't be read: is this the folder of a finished build?")
        }
        let raw: RawManifest
        do {
            raw = try JSONDecoder().decode(RawManifest.self, from: data)
        } catch let error as ShardmillError {
            throw error
        } catch {
            throw ShardmillError(.build, "\(file.path) is damaged: \(describe(error))")
        }
        try self.init(raw, folder: folder)
    }

    init(_ raw: RawManifest, folder: URL) throws {
        self.folder = folder
        model = raw.model
        context = raw.context
        contexts = raw.contexts ?? []
        tokensMax = raw.tokens_max
        widths = Array(Set(raw.widths)).sorted()
        verify = raw.verify ?? raw.widths.max() ?? 0
        margin = raw.margin ?? 0
        reshapeFrequency = raw.reshape_frequency ?? "infrequent"
        vocab = raw.vocab
        eos = raw.eos_token_ids
        rope = raw.rope
        window = raw.window.value
        windowSlots = raw.window_slots
        convTaps = raw.conv_taps
        embedding = try Self.inside(folder, raw.embedding.path)
        tokenizer = try Self.inside(folder, raw.tokenizer.path)
        parts = try raw.parts.map { try Part($0, folder: folder) }
        packages = try (raw.packages ?? [:]).mapValues { try Self.inside(folder, $0.path) }
        chat = raw.chat
        try check()
    }

    /// Return the URL of a path in the build. Throws if the path leads out of the build.
    static func inside(_ folder: URL, _ path: String) throws -> URL {
        let steps = path.split(separator: "/", omittingEmptySubsequences: false)
        if path.isEmpty || path.hasPrefix("/") || path.contains("\0") || steps.contains("..") {
            throw ShardmillError(.build, "model.json: the path '\(path.prefix(100))' leads out of the build")
        }
        return folder.appendingPathComponent(path)
    }

    /// Check what the types can't say.
    private func check() throws {
        func demand(_ good: Bool, _ reason: @autoclosure () -> String) throws {
            if !good { throw ShardmillError(.build, "model.json: \(reason())") }
        }
        let most = 1 << 24  // far beyond any model; larger numbers would only exhaust the memory
        for (name, value) in [("context", context), ("tokens_max", tokensMax), ("vocab", vocab)] {
            try demand((1...most).contains(value), "\(name) is \(value)")
        }
        try demand(widths.first == 1 && widths.last! <= tokensMax, "widths \(widths) do not range from 1 to tokens_max")
        try demand((1...tokensMax).contains(verify), "verify is \(verify)")
        try demand((0...most).contains(windowSlots), "window_slots is \(windowSlots)")
        try demand((0...convRing).contains(convTaps), "conv_taps is \(convTaps)")
        try demand(window.map { (1...most).contains($0) } ?? (windowSlots == 0), "window does not fit window_slots")
        try demand(chat?.stop.allSatisfy { (0..<vocab).contains($0) } ?? true, "chat.stop is not in the vocabulary")
        try demand(eos.allSatisfy { (0..<vocab).contains($0) }, "eos_token_ids are not in the vocabulary")
        try demand(margin >= 0 && margin.isFinite, "margin is \(margin)")
        let ascending = zip(lengths, lengths.dropFirst()).allSatisfy { $0 < $1 } && lengths[0] > 0
        try demand(ascending, "contexts are not ascending numbers of slots below context")
        try demand(rope.keys.allSatisfy { $0 == "rope" || $0 == "rope_local" }, "rope has an unknown table")
        for (name, table) in rope {
            let finite = table.inv_freq.allSatisfy(\.isFinite) && table.scale.isFinite
            try demand(finite && (1...most).contains(table.inv_freq.count), "the table \(name) of rope is damaged")
        }
        var before: Part.Kind?
        for part in parts {
            try part.check(self)
            try demand(part.kind != .experts || before == .layers || before == .experts, "\(part.name) follows no layers")
            before = part.kind
        }
        try demand(parts.first?.kind == .layers, "the first part is not of the kind layers")
        try demand(parts.contains { $0.kind == .head }, "no part is of the kind head")
        let rows = parts.filter { $0.kind == .head }.map { $0.end - $0.start }.reduce(0, +)
        try demand(rows == vocab, "the head parts have \(rows) rows, the vocabulary \(vocab)")
    }
}

/// How a conversation becomes text: what stands before and after each message, and what an answer begins with.
///
/// The build proves it against the checkpoint's chat template; a template that does more is not in model.json.
public struct ChatFormat: Decodable, Equatable, Sendable {
    public struct Around: Decodable, Equatable, Sendable {
        public let before: String
        public let after: String
    }

    /// The text before the first message.
    public let begin: String
    public let system: Around?
    public let user: Around
    public let assistant: Around
    /// The text after which the answer begins.
    public let generate: String
    /// Tokens that end an answer, beside `eos_token_ids`.
    public let stop: [Int]
}

/// A rotary table: `inv_freq` [rope_dim / 2], and the factor of its cosines and sines.
public struct RopeTable: Decodable, Sendable {
    public let inv_freq: [Double]
    public let scale: Double
}

/// One program of a model.
public struct Part: Sendable {
    public enum Kind: String, Decodable, Sendable { case layers, experts, head }

    /// Functions by width, and the shapes of inputs and states, at one context length.
    public struct Length: Sendable {
        public let functions: [Int: String]
        public let inputs: [String: [Extent]]
        public let states: [String: [Int]]
    }

    /// An extent of a shape: a number, or T, the tokens of a pass.
    public enum Extent: Equatable, Sendable {
        case fixed(Int)
        case tokens
    }

    public let name: String
    public let kind: Kind
    public let start: Int
    public let end: Int
    public let inputs: [String: [Extent]]
    public let states: [String: [Int]]
    /// For each cache that the host keeps, by the name of its input, the output with the rows that a pass adds.
    public let written: [String: String]
    /// The name of the function for each width; empty if one function accepts every width up to `tokens_max`.
    public let functions: [Int: String]
    /// The lengths by number of slots; empty if all passes use `functions`.
    public let lengths: [Int: Length]
    public let program: URL
    /// The compiled bundle of each function, if each has one of its own.
    public let bundles: [String: URL]
    /// The engine whose compiler made the bundle: "coreml" with the version and build of the system, or "portable".
    public let compiler: [String: String]

    init(_ raw: RawPart, folder: URL) throws {
        name = raw.name
        guard let known = Kind(rawValue: raw.kind) else {
            throw ShardmillError(.build, "model.json: \(raw.name) is of the kind '\(raw.kind)', which this version can't run")
        }
        kind = known
        start = raw.start
        end = raw.end
        inputs = raw.inputs
        states = raw.states
        written = raw.written ?? [:]
        functions = try Self.byNumber(raw.functions ?? [:], raw.name)
        program = try Manifest.inside(folder, raw.program.path)
        bundles = try (raw.program.bundles ?? [:]).mapValues { try Manifest.inside(folder, $0) }
        compiler = raw.program.compiler ?? [:]
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
                throw ShardmillError(.build, "model.json: '\(key.prefix(40))' of \(part) is not a number of tokens or slots")
            }
            found[number] = value
        }
        return found
    }

    /// Return the functions and shapes at a context length.
    func length(_ slots: Int) -> Length {
        lengths[slots] ?? Length(functions: functions, inputs: inputs, states: states)
    }

    /// Return the token axis of each input; inputs without one (caches) are left out.
    var tokenAxes: [String: Int] {
        inputs.compactMapValues { $0.firstIndex(of: .tokens) }
    }

    func check(_ manifest: Manifest) throws {
        func refuse(_ reason: String) -> ShardmillError { ShardmillError(.build, "model.json: \(name): \(reason)") }
        let shapes = inputs.values.map { $0 } + lengths.values.flatMap { $0.inputs.values }
        let extents = shapes.flatMap { $0 } + states.values.flatMap { $0.map(Extent.fixed) }
        for case .fixed(let extent) in extents where !(1...1 << 24).contains(extent) { throw refuse("an extent is \(extent)") }
        if start < 0 || end <= start || end > 1 << 24 { throw refuse("it ranges from \(start) to \(end)") }
        if Set(lengths.keys) != Set(lengths.isEmpty ? [] : manifest.contexts) { throw refuse("its contexts are others") }
        if !lengths.isEmpty && functions.isEmpty { throw refuse("it has contexts but no functions") }
        for (input, output) in written where inputs[input]?.count != 4 || output.isEmpty {
            throw refuse("\(input) is no cache")
        }
        switch kind {
        case .layers:
            guard let x = inputs["x"], x.count == 4, case .fixed = x[1], x[2] == .tokens else { throw refuse("it has no x") }
        case .experts:
            guard let weights = inputs["weights"], weights.count == 4, weights[1] == .fixed(end - start), inputs["x"] != nil
            else { throw refuse("its weights are not those of its experts") }
        case .head:
            if inputs["hidden"]?.count != 4 { throw refuse("it has no hidden") }
        }
        let known: Set = [
            "x", "hidden", "weights", "rope_cos", "rope_sin", "rope_cos_local", "rope_sin_local", "attn_mask",
            "attn_mask_sliding", "kv_write_mask", "kv_write_mask_sliding", "conv_write_mask", "conv_read_mask",
        ]
        for input in inputs.keys where !known.contains(input) && written[input] == nil {
            throw refuse("the input '\(input.prefix(40))' is unknown to this version")
        }
        let halves = ["rope_cos": "rope", "rope_cos_local": "rope_local"]
        for (input, table) in halves {
            guard let shape = inputs[input] else { continue }
            guard let frequencies = manifest.rope[table]?.inv_freq.count, shape == [.tokens, .fixed(frequencies)] else {
                throw refuse("\(input) does not fit the table \(table) of rope")
            }
        }
        if let mask = inputs["attn_mask"], mask.last != .fixed(manifest.context) { throw refuse("attn_mask does not fit context") }
        let ring = manifest.windowSlots == 0 ? manifest.context : manifest.windowSlots
        if let mask = inputs["attn_mask_sliding"], mask.last != .fixed(ring) { throw refuse("attn_mask_sliding does not fit") }
        if inputs["attn_mask_sliding"] != nil && manifest.window == nil { throw refuse("it slides, but window is null") }
        if inputs["conv_read_mask"] != nil && manifest.convTaps < 2 { throw refuse("it has convolutions, but conv_taps is small") }
    }
}

// MARK: - The file as it is written

struct RawManifest: Decodable {
    struct Entry: Decodable { let path: String }
    struct Window: Decodable {
        let value: Int?
        init(from decoder: Decoder) throws {
            let single = try decoder.singleValueContainer()
            value = single.decodeNil() ? nil : try single.decode(Int.self)
        }
    }

    let model: String
    let context, tokens_max: Int
    let widths: [Int]
    let verify: Int?
    let margin: Double?
    let reshape_frequency: String?
    let contexts: [Int]?
    let vocab: Int
    let eos_token_ids: [Int]
    let rope: [String: RopeTable]
    let window: Window
    let window_slots, conv_taps: Int
    let embedding, tokenizer: Entry
    let parts: [RawPart]
    let packages: [String: Entry]?
    let chat: ChatFormat?

    private enum Keys: String, CodingKey {
        case format, model, context, tokens_max, widths, verify, margin, reshape_frequency, contexts, vocab, eos_token_ids
        case rope, window, window_slots, conv_taps, embedding, tokenizer, parts, packages, chat, buckets
    }

    init(from decoder: Decoder) throws {
        let keys = try decoder.container(keyedBy: Keys.self)
        let format = try keys.decode(Int.self, forKey: .format)
        if format != 2 { throw ShardmillError(.build, "model.json is of format \(format); this version reads format 2") }
        if keys.contains(.buckets) {
            throw ShardmillError(.build, "model.json is an encoder's: open it with Encoder, not as a decoder")
        }
        model = try keys.decode(String.self, forKey: .model)
        context = try keys.decode(Int.self, forKey: .context)
        tokens_max = try keys.decode(Int.self, forKey: .tokens_max)
        widths = try keys.decode([Int].self, forKey: .widths)
        verify = try keys.decodeIfPresent(Int.self, forKey: .verify)
        margin = try keys.decodeIfPresent(Double.self, forKey: .margin)
        reshape_frequency = try keys.decodeIfPresent(String.self, forKey: .reshape_frequency)
        contexts = try keys.decodeIfPresent([Int].self, forKey: .contexts)
        vocab = try keys.decode(Int.self, forKey: .vocab)
        eos_token_ids = try keys.decode([Int].self, forKey: .eos_token_ids)
        rope = try keys.decode([String: RopeTable].self, forKey: .rope)
        window = try keys.decode(Window.self, forKey: .window)  // null is a value, absence is an error
        window_slots = try keys.decode(Int.self, forKey: .window_slots)
        conv_taps = try keys.decode(Int.self, forKey: .conv_taps)
        embedding = try keys.decode(Entry.self, forKey: .embedding)
        tokenizer = try keys.decode(Entry.self, forKey: .tokenizer)
        parts = try keys.decode([RawPart].self, forKey: .parts)
        packages = try keys.decodeIfPresent([String: Entry].self, forKey: .packages)
        chat = try keys.decodeIfPresent(ChatFormat.self, forKey: .chat)
    }
}

struct RawPart: Decodable {
    struct Program: Decodable {
        let path: String
        let bundles: [String: String]?
        let compiler: [String: String]?
    }

    struct Shorter: Decodable {
        let functions: [String: String]
        let inputs: [String: [Part.Extent]]?
        let states: [String: [Int]]?
    }

    let name, kind: String
    let start, end: Int
    let inputs: [String: [Part.Extent]]
    let states: [String: [Int]]
    let written: [String: String]?
    let functions: [String: String]?
    let contexts: [String: Shorter]?
    let program: Program
}

extension Part.Extent: Decodable {
    public init(from decoder: Decoder) throws {
        let single = try decoder.singleValueContainer()
        if let number = try? single.decode(Int.self) {
            self = .fixed(number)
        } else if try single.decode(String.self) == "T" {
            self = .tokens
        } else {
            throw DecodingError.dataCorruptedError(in: single, debugDescription: "an extent is a number or \"T\"")
        }
    }
}

/// Return where JSON does not have the shape that is expected, in one line.
public func describe(_ error: any Error) -> String {
    guard let error = error as? DecodingError else { return "\(error)" }
    func place(_ context: DecodingError.Context, _ last: String? = nil) -> String {
        let steps = context.codingPath.map { $0.intValue.map { "[\($0)]" } ?? $0.stringValue } + (last.map { [$0] } ?? [])
        return steps.joined(separator: ".")
    }
    switch error {
    case .keyNotFound(let key, let context): return "\(place(context, key.stringValue)) is missing"
    case .typeMismatch(let type, let context): return "\(place(context)) is no \(type)"
    case .valueNotFound(_, let context): return "\(place(context)) is null"
    case .dataCorrupted(let context): return place(context).isEmpty ? "it is no JSON" : "\(place(context)) is not valid"
    @unknown default: return "\(error)"
    }
}
