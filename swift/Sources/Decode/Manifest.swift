import Foundation

/// Features that this version knows, as `uses` of model.json names them.
private let features: Set = [
    "contexts", "functions", "bundles", "written", "experts", "rings", "conv", "recurrent", "recurrent-blocks",
    "per-layer", "drafter", "int8-table", "adapters", "lent", "labels",
]

/// model.json of a decoder's build, format 2. docs/model-json.md in the repository explains every key.
public struct Manifest: Sendable {
    /// The model's name.
    public let model: String
    /// S, the number of key/value slots.
    public let context: Int
    /// Numbers of slots that programs also have functions for, ascending, without `context`.
    package let contexts: [Int]
    /// The most tokens in a pass.
    package let tokensMax: Int
    /// The numbers of tokens that a pass should have, ascending; the widest is for feeding prompts.
    package let widths: [Int]
    /// The most tokens of a decode pass, the pending token and its drafts.
    package let verify: Int
    /// Two tokens whose logits are closer than this may change places with the width of a pass.
    package let margin: Double
    /// Core ML's hint for programs of flexible shapes: "infrequent" or "frequent".
    package let reshapeFrequency: String
    /// The number of tokens in the vocabulary.
    public let vocab: Int
    /// Tokens that end a generation.
    public let eos: [Int]
    /// Rotary tables, by name.
    package private(set) var rope: [String: RopeTable]
    /// How many positions a sliding layer sees; nil if no layer slides.
    package private(set) var window: Int?
    /// The number of slots of a sliding layer's ring; 0 if sliding layers have a slot for each position.
    package private(set) var windowSlots: Int
    /// The number of taps of short convolutions; 0 if there are none.
    package private(set) var convTaps: Int
    /// The numbers of layers that are a recurrence; nil if there are none.
    package private(set) var recurrence: Recurrence?
    /// The largest rank of adapters that the programs take; nil if they take none.
    package let adapterRank: Int?
    /// The file with the host's table.
    package let embedding: URL
    /// tokenizer.json.
    package let tokenizer: URL
    /// What the programs must give, see `Expected`; nil in builds that were made before there were such results.
    package let expected: URL?
    /// The programs, in the order of a pass.
    package private(set) var parts: [Part]
    /// The head that drafts for the model; nil if there is none.
    package private(set) var drafter: DraftHead?
    /// The package that each part's program was compiled from, by the part's name.
    package let packages: [String: URL]
    /// How a conversation becomes text; nil if the build says nothing of it, or no plain form could be proven.
    public let chat: ChatFormat?
    /// How the checkpoint's authors sample; nil if they do not say.
    public let sampling: Sampling?
    /// Features of the build that a runtime must know; empty in builds that were made before the key was added.
    package let uses: [String]
    /// The oldest versions of systems that load the programs, by "macos" and "ios", such as "15.0"; empty if not known.
    public let requires: [String: String]
    /// The bytes of the programs, the table and the tokenizer; nil in builds that were made before the key was added.
    public let bytes: Int?
    /// The build's folder.
    public let folder: URL

    /// All context lengths, ascending; the last is the whole context.
    package var lengths: [Int] { contexts + [context] }

    /// The programs of the model, and those of its drafter.
    package var allParts: [Part] { parts + (drafter.map { [$0.fuse] + $0.parts } ?? []) }

    /// Return the manifest without the drafter, whose programs need not be loaded.
    package var withoutDrafter: Manifest {
        var found = self
        found.drafter = nil
        return found
    }

    /// Return the manifest as if the drafter were the model, without the drafter's first part.
    func of(_ drafter: DraftHead) -> Manifest {
        var found = withoutDrafter
        (found.parts, found.rope, found.convTaps, found.recurrence) = (drafter.parts, drafter.rope, 0, nil)
        if drafter.kind != .assistant { (found.window, found.windowSlots) = (nil, 0) }
        return found
    }

    /// Read a build's model.json.
    ///
    /// - Throws: `ShardmillError` of kind `build` that names the key, if the file is missing, damaged, of another
    ///   format, or contradicts itself.
    package init(folder: URL) throws {
        let file = folder.appendingPathComponent("model.json")
        guard let data = try? Data(contentsOf: file) else {
            throw ShardmillError(.build, "\(file.path) can't be read: is this the folder of a finished build?")
        }
        let raw: RawManifest
        do {
            raw = try decoded(RawManifest.self, from: data)
        } catch let error as ShardmillError {
            throw error
        } catch {
            throw ShardmillError(.build, "\(file.path) is damaged: \(describe(error))")
        }
        try self.init(raw, folder: folder)
    }

    init(_ raw: RawManifest, folder: URL) throws {
        if raw.uses?.contains("images") == true {
            throw ShardmillError(
                .build,
                "model.json: the build reads images, which this package does not run: build it without `images`, or "
                    + "answer with shardmill serve")
        }
        if let unknown = raw.uses?.first(where: { !features.contains($0) }) {
            let name = unknown.prefix(40)
            throw ShardmillError(.build, "model.json: the build uses '\(name)', which this version can't run")
        }
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
        recurrence = raw.recurrent
        adapterRank = raw.adapters
        embedding = try Self.inside(folder, raw.embedding.path)
        tokenizer = try Self.inside(folder, raw.tokenizer.path)
        expected = try raw.expected.map { try Self.inside(folder, $0.path) }
        let passing = raw.parts.filter { $0.drafter != true && $0.kind != "labels" }  // a pass runs the whole head
        parts = try passing.map { try Part($0, folder: folder) }
        drafter = try DraftHead(raw, folder: folder)
        packages = try (raw.packages ?? [:]).mapValues { try Self.inside(folder, $0.path) }
        chat = raw.chat
        sampling = raw.sampling.map(Sampling.init)
        uses = raw.uses ?? []
        requires = raw.requires ?? [:]
        let sizes = [raw.embedding.bytes, raw.tokenizer.bytes] + raw.parts.map(\.program.bytes)
        for case .some(let size) in sizes where !(0...1 << 50).contains(size) {
            throw ShardmillError(.build, "model.json: a file of \(size) bytes")
        }
        bytes = sizes.contains(nil) ? nil : sizes.compactMap { $0 }.reduce(0, +)
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
        let ranging = widths.first == 1 && (widths.last ?? 0) <= tokensMax
        try demand(ranging, "widths do not range from 1 to tokens_max")
        try demand(["infrequent", "frequent"].contains(reshapeFrequency), "reshape_frequency is no hint of Core ML's")
        try demand((1...tokensMax).contains(verify), "verify is \(verify)")
        try demand((0...most).contains(windowSlots), "window_slots is \(windowSlots)")
        try demand((0...convRing).contains(convTaps), "conv_taps is \(convTaps)")
        if let recurrence {
            let (block, taps) = (recurrence.block, recurrence.taps)
            let fits = (1...convRing).contains(block) && (1...convRing).contains(taps)
            try demand(fits && 2 * block + taps - 1 <= convRing, "recurrent does not fit a ring of \(convRing)")
            let (narrow, count) = (recurrence.narrow ?? tokensMax, tokensMax)
            let inBlocks = count <= block || recurrence.narrow != nil && count % block == 0
            try demand(inBlocks, "passes of \(count) tokens are too wide for a recurrence of \(block)")
            try demand((verify...max(verify, block)).contains(narrow), "recurrent.narrow is \(narrow)")
        }
        try demand(window.map { (1...most).contains($0) } ?? (windowSlots == 0), "window does not fit window_slots")
        try demand(chat?.stop.allSatisfy { (0..<vocab).contains($0) } ?? true, "chat.stop is not in the vocabulary")
        try demand(eos.allSatisfy { (0..<vocab).contains($0) }, "eos_token_ids are not in the vocabulary")
        do { try sampling?.check(vocab: vocab) } catch { try demand(false, "sampling: \(error)") }
        try demand(margin >= 0 && margin.isFinite, "margin is \(margin)")
        let ascending = zip(lengths, lengths.dropFirst()).allSatisfy { $0 < $1 } && lengths[0] > 0
        try demand(ascending, "contexts are not ascending numbers of slots below context")
        try demand(rope.keys.allSatisfy { $0 == "rope" || $0 == "rope_local" }, "rope has an unknown table")
        for (name, table) in rope {
            let finite = table.inv_freq.allSatisfy(\.isFinite) && table.scale.isFinite
            try demand(finite && (1...most).contains(table.inv_freq.count), "the table \(name) of rope is damaged")
        }
        try drafter?.check(self)
        try checkParts(rows: vocab)
    }

    /// Check the programs of a pass, whose LM head gives `rows` logits.
    func checkParts(rows wanted: Int, lenders: [Part] = []) throws {
        func demand(_ good: Bool, _ reason: @autoclosure () -> String) throws {
            if !good { throw ShardmillError(.build, "model.json: \(reason())") }
        }
        var before: Part.Kind?
        for (place, part) in parts.enumerated() {
            let isOurs = [.layers, .experts, .head].contains(part.kind)
            try demand(isOurs, "\(part.name.prefix(40)) is an encoder's or a drafter's, in a decoder's build")
            try part.check(self, lenders: lenders + (part.lent.isEmpty ? [] : parts[..<place]))
            let inPlace = part.kind != .experts || before == .layers || before == .experts
            try demand(inPlace, "\(part.name) follows no layers")
            before = part.kind
        }
        try demand(parts.first?.kind == .layers, "the first part is not of the kind layers")
        try demand(parts.contains { $0.kind == .head }, "no part is of the kind head")
        let rows = headRows
        try demand(rows == wanted, "the head parts have \(rows) rows, the vocabulary \(wanted)")
    }
}

extension Manifest {
    /// The logits that the parts of the LM head give for a token.
    var headRows: Int { parts.filter { $0.kind == .head }.map { $0.end - $0.start }.reduce(0, +) }
}

/// A head that proposes tokens, from hidden states that a pass of the model has left (EAGLE-3), an MTP layer, which is
/// run like a head (Qwen3.5), or an assistant, which reads the model's caches too (Gemma 4).
package struct DraftHead: Sendable {
    /// What drafts.
    package enum Kind: String, Sendable {
        /// A head with keys and values of its own.
        case head = "eagle3"
        /// A further layer of the model's checkpoint, with keys and values of its own.
        case mtp
        /// An assistant, which has none.
        case assistant

        /// The kind of its first part.
        fileprivate var begins: Part.Kind {
            switch self {
            case .head: .fuse
            case .mtp: .mtp
            case .assistant: .join
            }
        }
    }

    /// What drafts.
    package let kind: Kind
    /// The layers of the model whose inputs it reads, in order. The last may be the number of layers: their output.
    package let taps: [Int]
    /// The model's token for each row of its logits.
    package let tokens: [Int]
    /// Its rotary tables, by name.
    package let rope: [String: RopeTable]
    /// The program that makes one row of the taps of a token, or of what an MTP layer or an assistant begins with.
    package let fuse: Part
    /// Its other programs, in the order of a pass.
    package let parts: [Part]

    /// Read the head of a build; nil if it has none.
    init?(_ raw: RawManifest, folder: URL) throws {
        func refuse(_ reason: String) -> ShardmillError { ShardmillError(.build, "model.json: drafter: \(reason)") }
        let own = try raw.parts.filter { $0.drafter == true }.map { try Part($0, folder: folder) }
        guard let drafter = raw.drafter else {
            if own.isEmpty { return nil }
            throw refuse("it is missing, but \(own[0].name.prefix(40)) is a drafter's")
        }
        guard let known = Kind(rawValue: drafter.kind) else {
            throw refuse("it is of the kind '\(drafter.kind.prefix(40))', which this version can't run")
        }
        kind = known
        guard let first = own.first, first.kind == kind.begins else {
            throw refuse("its first part is not of the kind \(kind.begins.rawValue)")
        }
        if kind == .assistant && own.map(\.kind) != [.join, .layers, .head] {
            throw refuse("an assistant has parts of the kinds join, layers and head")
        }
        (taps, rope, fuse, parts) = (drafter.taps, drafter.rope, first, Array(own.dropFirst()))
        if !(1...1 << 24).contains(drafter.vocab) { throw refuse("vocab is \(drafter.vocab)") }
        if let coded = drafter.tokens {
            guard let bits = Data(base64Encoded: coded) else { throw refuse("tokens are no base64") }
            tokens = bits.enumerated().flatMap { place, byte in
                (0..<8).filter { byte >> $0 & 1 == 1 }.map { 8 * place + $0 }
            }
        } else {
            tokens = Array(0..<drafter.vocab)
        }
        if tokens.count != drafter.vocab || tokens.last.map({ $0 >= raw.vocab }) == true {
            throw refuse("it has \(drafter.vocab) rows, and tokens for \(tokens.count), or some the model lacks")
        }
    }

    /// Check what the types can't say.
    func check(_ model: Manifest) throws {
        let layers = model.parts.filter { $0.kind == .layers }
        let known = Set(layers.flatMap { [$0.start] + $0.taps.values } + [layers.last?.end ?? 0])
        if kind != .assistant && taps.isEmpty || taps.count > 16 || !taps.allSatisfy(known.contains) {
            throw ShardmillError(.build, "model.json: drafter: no part gives its taps")
        }
        let own = model.of(self)
        try fuse.check(own)
        try own.checkParts(rows: tokens.count, lenders: kind == .assistant ? layers : [])
    }
}

/// A rotary table: `inv_freq` [rope_dim / 2], and the factor of its cosines and sines.
package struct RopeTable: Decodable, Sendable {
    /// The angle that each pair of channels turns by from a position to the next.
    package let inv_freq: [Double]
    /// The factor of all cosines and sines.
    package let scale: Double
}
