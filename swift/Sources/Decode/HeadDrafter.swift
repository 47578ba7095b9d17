import Foundation

/// Hidden states that a drafter reads, by slot: the inputs of some layers, in fp16.
struct Taps {
    private let layers: [Int]
    private let columns: Int
    /// [slots, layers * columns], as bits.
    private var values: [UInt16]

    init(_ layers: [Int], slots: Int, columns: Int) {
        self.layers = layers
        self.columns = columns
        values = [UInt16](repeating: 0, count: slots * layers.count * columns)
    }

    /// Take the first channels of a layer's input [1, channels, T, 1], if the drafter reads that layer.
    mutating func write(_ rows: HostArray, layer: Int, slots: [Int]) {
        for (place, own) in layers.enumerated() where own == layer {
            for (t, slot) in slots.enumerated() {
                let first = (slot * layers.count + place) * columns
                for c in 0..<columns { values[first + c] = Half.bits(rows.values[c * rows.shape[2] + t]) }
            }
        }
    }

    /// Return what was taken at slots, the layers one after the other: [1, layers * columns, T, 1].
    func read(_ slots: [Int]) -> HostArray {
        let width = layers.count * columns
        var found = HostArray(zeros: [1, width, slots.count, 1])
        for (t, slot) in slots.enumerated() {
            for c in 0..<width { found.values[c * slots.count + t] = Half.float(values[slot * width + c]) }
        }
        return found
    }
}

/// The programs of a build's head, or of its MTP layer, which is run like a head. At position p it is fed the token at
/// p + 1 of the model's text, and gives logits of the token at p + 2.
///
/// Beside the token it reads what the model computed at p: its taps, or its own output at p - 1 where the model has not
/// been yet.
final class HeadEngine: Engine {
    /// At how many positions the model has been.
    var known = 0
    fileprivate let model: Engine
    private let fuse: Program
    /// Whether the first program also takes the embedding and the head's own output.
    private let joins: Bool

    init(_ model: Engine, _ head: DraftHead, backend: any Backend) throws {
        self.model = model
        fuse = try Program(head.fuse, backend: backend)
        joins = head.kind == .mtp
        try super.init(of: model.manifest.of(head), backend) { _, _ in }
        model.keepTaps(head.taps)
    }

    override func hidden(_ tokens: [Int], slots: [Int], positions: [Int], parts: Int?) throws -> HostArray {
        let embedded = try table.columns(of: tokens)
        let isKnown = positions[0] < known
        var states = isKnown ? try taken(slots) : try own(positions)
        func joined(_ rows: [Float]) -> HostArray {
            let values = embedded.values + rows
            return HostArray(shape: [1, values.count / tokens.count, tokens.count, 1], values: values)
        }
        if joins {
            let nothing = [Float](repeating: 0, count: states.values.count)
            let x = joined(isKnown ? states.values + nothing : nothing + states.values)
            return try through(fuse.run(["x": x], tokens: tokens.count), slots: slots, positions: positions)
        }
        if isKnown { states = try fuse.run(["x": states], tokens: tokens.count) }
        return try through(joined(states.values), slots: slots, positions: positions)
    }

    /// Return what the model computed at slots. Padding reads what is left there from before; nobody reads its outputs.
    private func taken(_ slots: [Int]) throws -> HostArray {
        guard let taps = model.taps else { throw ShardmillError(.program, "the model keeps no taps") }
        return taps.read(slots)
    }

    /// Return the head's own outputs for the positions before these.
    private func own(_ positions: [Int]) throws -> HostArray {
        guard let (first, rows) = last, first < positions[0], positions.last! <= first + rows.shape[2] else {
            throw ShardmillError(.program, "the head has no output for the position before \(positions[0])")
        }
        var found = HostArray(zeros: [1, rows.shape[1], positions.count, 1])
        for channel in 0..<rows.shape[1] {
            for (t, position) in positions.enumerated() {
                found.values[channel * positions.count + t] =
                    rows.values[channel * rows.shape[2] + position - 1 - first]
            }
        }
        return found
    }
}

/// Drafts from the build's own head (EAGLE-3) or MTP layer (Qwen3.5): the tokens that it finds likeliest, whatever the
/// sampling.
///
/// Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. The
/// head's session holds the text from its second token on. Its drafts are dropped after a pass, and the next proposal
/// reads the hidden states that the pass has left in the model's engine.
package final class HeadDrafter: Drafter {
    private let head: HeadEngine
    private let session: Session
    private let drafted: [Int]
    /// The prompt and all emitted tokens.
    private var text: [Int] = []
    /// The first token that the session's tokens followed; the session does not hold it.
    private var first: Int?
    /// The adapter of the model whose hidden states the session's tokens were fed with.
    private var adapter: AdapterVersion?
    private var isFresh = true
    /// The tokens that a proposal found in the session, until they are observed.
    private var proposedAt: Int?

    /// Load the head of the session's build. The session forgets its tokens, since nobody has kept their taps.
    ///
    /// - Throws: `ShardmillError` if the build has no head, or the head can't be loaded.
    package init(_ model: Session, backend: any Backend) throws {
        let manifest = model.engine.manifest
        guard let format = manifest.drafter, format.kind != .assistant else {
            throw ShardmillError(.request, "\(manifest.model) has no head to draft with")
        }
        drafted = format.tokens
        head = try HeadEngine(model.engine, format, backend: backend)
        session = try Session(head, contextPolicy: model.contextPolicy)
        _ = try model.truncate(0)
    }

    package func reset(_ prompt: [Int]) throws {
        try dropDrafts()  // the last request may have been abandoned in the middle of a pass
        if prompt.first != first || head.model.adapter != adapter { _ = try session.truncate(0) }
        (text, first, adapter, isFresh) = (prompt, prompt.first, head.model.adapter, true)
    }

    package func propose(_ limit: Int) throws -> Draft {
        if limit < 1 || text.count < 2 || !session.canHold(text.count - 1) { return Draft() }
        head.known = text.count - 1
        var (logits, row) = try caughtUp(Array(text.dropFirst()))
        proposedAt = text.count - 1
        let most = min(limit, 1 + session.undoable())
        var draft = Draft()
        while true {
            let (place, share) = likeliest(try logits.row(row))
            draft.tokens.append(drafted[place])
            draft.confidence.append(share)
            if draft.tokens.count == most { return draft }
            (logits, row) = (try session.feed([drafted[place]]), 0)
            session.commit(1)
        }
    }

    package func observe(_ emitted: [Int]) throws {
        try dropDrafts()
        text += emitted
    }

    private func dropDrafts() throws {
        if let proposedAt { _ = try session.truncate(min(proposedAt, session.tokens.count)) }
        proposedAt = nil
    }

    /// Run the tokens that the session lacks; return the logits after the last one, and their row.
    private func caughtUp(_ context: [Int]) throws -> (Logits, Int) {
        if isFresh || session.tokens.isEmpty || session.tokens.count >= context.count {
            isFresh = false
            let prefill = try session.prefill(context)
            return (prefill.logits!, prefill.row)
        }
        while true {
            let held = session.tokens.count
            let count = min(session.room(), context.count - held)
            let logits = try session.feed(Array(context[held..<held + count]))
            session.commit(count)
            if held + count == context.count { return (logits, count - 1) }
        }
    }
}

/// Load what a session's build has to draft with: a head, an MTP layer or an assistant.
///
/// - Throws: `ShardmillError` if the build has none of them, or it can't be loaded.
package func loadDrafter(_ model: Session, backend: any Backend) throws -> any Drafter {
    model.engine.manifest.drafter?.kind == .assistant
        ? try AssistantDrafter(model, backend: backend) : try HeadDrafter(model, backend: backend)
}

/// Return the place of the largest logit, among equals the first, and its share in the softmax.
func likeliest(_ logits: [Float]) -> (Int, Double) {
    let highest = logits.max() ?? 0
    let total = logits.reduce(0.0) { $0 + exp(Double($1) - Double(highest)) }
    return (logits.firstIndex(of: highest) ?? 0, 1 / total)
}
