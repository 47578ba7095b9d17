import Foundation

/// model.json of an encoder's build, format 2. docs/model-json.md in the repository explains every key.
public struct EncoderManifest: Sendable {
    /// What the model is for, by the hub's names.
    public enum Task: String, Sendable {
        /// A label for each token.
        case tokens = "token-classification"
        /// A label for each text.
        case texts = "text-classification"
        /// An embedding of each text.
        case embeddings = "feature-extraction"
    }

    /// How an embedding is made from the rows of a text.
    package enum Pooling: String, Sendable {
        /// The mean of all rows.
        case mean
        /// The first row.
        case cls
    }

    /// The model's name.
    public let model: String
    /// What the model is for.
    public let task: Task
    /// The tokens that a pass may have, in the order of their programs.
    package let buckets: [Int]
    /// The names of the labels, by row of the logits.
    public let labels: [String]
    /// How many positions a token of a sliding layer sees on either side; nil if no layer slides.
    package let band: Int?
    /// How many tokens on either side an output may depend on; nil if on all.
    package let reach: Int?
    /// How an embedding is made.
    package let pooling: Pooling
    /// The number of tokens in the vocabulary.
    package let vocab: Int
    /// Rotary tables, by name.
    package let rope: [String: RopeTable]
    /// The file with the host's tables.
    package let embedding: URL
    /// tokenizer.json.
    package let tokenizer: URL
    /// The checkpoint's calibration of transitions between labels; nil if it has none.
    package let calibration: URL?
    /// The programs of each bucket, bucket by bucket; a bucket's follow one another in a pass.
    package let parts: [Part]
    /// The package that each part's program was compiled from, by the part's name.
    package let packages: [String: URL]
    /// The build's folder.
    public let folder: URL

    /// How many programs a pass runs.
    var chain: Int { parts.count / buckets.count }

    /// Return the bucket of a part, by the part's place.
    func bucket(of place: Int) -> Int { buckets[place / chain] }

    /// The most tokens of a pass.
    public var longest: Int { buckets.max() ?? 0 }

    private struct Raw: Decodable {
        struct Texts: Decodable {
            let path: String
            let files: [String: String]?
        }

        let format, vocab: Int
        let model, task, pooling: String
        let buckets: [Int]
        let labels: [String]
        let band, reach: Int?
        let rope: [String: RopeTable]
        let embedding, tokenizer: RawManifest.Entry
        let texts: Texts?
        let parts: [RawPart]
        let packages: [String: RawManifest.Entry]?
        let uses: [String]?
    }

    /// Read a build's model.json.
    ///
    /// - Throws: `ShardmillError` of kind `build` that names the key, if the file is missing, damaged, a decoder's, of
    ///   another format, or contradicts itself.
    package init(folder: URL) throws {
        let file = folder.appendingPathComponent("model.json")
        guard let data = try? Data(contentsOf: file) else {
            throw ShardmillError(.build, "\(file.path) can't be read: is this the folder of a finished build?")
        }
        let raw: Raw
        do {
            raw = try decoded(Raw.self, from: data)
        } catch {
            throw ShardmillError(.build, "\(file.path) is no encoder's, or damaged: \(describe(error))")
        }
        if raw.format != 2 {
            throw ShardmillError(.build, "model.json is of format \(raw.format); this version reads format 2")
        }
        func refuse(_ what: String, _ name: String) -> ShardmillError {
            ShardmillError(.build, "model.json: the build \(what) '\(name.prefix(40))', which this version can't run")
        }
        guard let task = Task(rawValue: raw.task) else { throw refuse("is for", raw.task) }
        guard let pooling = Pooling(rawValue: raw.pooling) else { throw refuse("pools rows by", raw.pooling) }
        let known: Set = ["int8-table", "encoder-chain", "per-layer"]
        if let unknown = raw.uses?.first(where: { !known.contains($0) }) { throw refuse("uses", unknown) }
        model = raw.model
        self.task = task
        buckets = raw.buckets
        labels = raw.labels
        band = raw.band
        reach = raw.reach
        self.pooling = pooling
        vocab = raw.vocab
        rope = raw.rope
        embedding = try Manifest.inside(folder, raw.embedding.path)
        tokenizer = try Manifest.inside(folder, raw.tokenizer.path)
        let calibrated = raw.texts?.files?["viterbi_calibration.json"] != nil
        calibration = try raw.texts.flatMap {
            calibrated ? try Manifest.inside(folder, $0.path + "/viterbi_calibration.json") : nil
        }
        parts = try raw.parts.map { try Part($0, folder: folder) }
        self.folder = folder
        packages = try (raw.packages ?? [:]).mapValues { try Manifest.inside(folder, $0.path) }
        try check()
    }

    /// Check what the types can't say.
    private func check() throws {
        func demand(_ good: Bool, _ reason: @autoclosure () -> String) throws {
            if !good { throw ShardmillError(.build, "model.json: \(reason())") }
        }
        let most = 1 << 24
        try demand((1...most).contains(vocab), "vocab is \(vocab)")
        try demand(
            !buckets.isEmpty && buckets.allSatisfy { (1...1 << 16).contains($0) }, "buckets are \(buckets.prefix(9))")
        let fits = !parts.isEmpty && parts.count % buckets.count == 0
        try demand(fits, "there are \(parts.count) parts for \(buckets.count) buckets")
        let chains = stride(from: 0, to: parts.count, by: chain).map { Array(parts[$0..<$0 + chain]) }
        for one in chains {
            let follow = one.map(\.start) == [0] + one.dropLast().map(\.end) && one.map(\.end) == chains[0].map(\.end)
            try demand(follow, "the parts are no chain of layers for each bucket")
        }
        try demand(Set(buckets).count == buckets.count, "a bucket stands twice")
        try demand((task == .embeddings) == labels.isEmpty, "labels do not fit the task")
        for (key, value) in [("band", band), ("reach", reach)] {
            try demand(value.map { (1...most).contains($0) } ?? true, "\(key) is out of range")
        }
        try demand(rope.keys.allSatisfy { $0 == "rope" || $0 == "rope_local" }, "rope has an unknown table")
        for (name, table) in rope {
            let finite = table.inv_freq.allSatisfy(\.isFinite) && table.scale.isFinite
            try demand(finite && (1...most).contains(table.inv_freq.count), "the table \(name) of rope is damaged")
        }
        for (place, part) in parts.enumerated() { try checkInputs(part, bucket(of: place)) }
    }

    private func checkInputs(_ part: Part, _ bucket: Int) throws {
        func refuse(_ reason: String) -> ShardmillError {
            ShardmillError(.build, "model.json: \(part.name.prefix(40)): \(reason)")
        }
        if part.kind != .encoder { throw refuse("it is not of the kind encoder") }
        let all = Part.Extent.fixed(bucket)
        for (input, given) in part.inputs {
            let shape = given.map { $0 == .tokens ? all : $0 }
            let mask = shape == [.fixed(1), .fixed(1), all, all]
            let fits: Bool
            switch input {
            case "x", "embedded":
                if case .fixed(let channels)? = shape.dropFirst().first {
                    fits = shape == [.fixed(1), .fixed(channels), all, .fixed(1)] && (1...1 << 20).contains(channels)
                } else {
                    fits = false
                }
            case "attn_mask": fits = mask
            case "attn_mask_sliding": fits = mask && band != nil
            case "rope_cos", "rope_sin", "rope_cos_local", "rope_sin_local":
                let table = rope[input.hasSuffix("_local") ? "rope_local" : "rope"]
                fits = table.map { shape == [all, .fixed($0.inv_freq.count)] } ?? false
            default: throw refuse("the input '\(input.prefix(40))' is unknown to this version")
            }
            if !fits { throw refuse("the input '\(input)' has another shape than model.json implies") }
        }
        if part.inputs["x"] == nil || !part.states.isEmpty || !part.functions.isEmpty || !part.written.isEmpty {
            throw refuse("its inputs are not an encoder's")
        }
    }
}
