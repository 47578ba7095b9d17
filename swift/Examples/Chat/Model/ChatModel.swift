import Foundation
import Shardmill

#if canImport(Darwin)
import Observation
#endif

/// What the windows show: a build, its loading, one conversation and a check. It knows nothing of SwiftUI.
#if canImport(Darwin)  // where windows look at it; Swift 6.0 for Linux can't link its module Observation
@Observable
#endif
@MainActor
final class ChatModel {
    enum Phase: Equatable {
        case empty
        case loading(String, Double)
        case ready
        case answering
    }

    struct Line: Identifiable {
        let id = UUID()
        let isUser: Bool
        var text: String
        var thought = ""
    }

    private(set) var phase = Phase.empty
    private(set) var name = "No model"
    private(set) var lines: [Line] = []
    /// The last error, with what helps.
    private(set) var note = ""
    /// The speed of the last answer, and what a check of the model found.
    private(set) var (speed, verdict) = ("", "")
    private let store: ModelStore
    private let openModel: @Sendable (URL) throws -> ShardmillModel
    private var model: ShardmillModel?
    private var chat: Chat?
    private var isHidden = false
    private var front: CheckedContinuation<Void, Never>?
    /// What the model is at; its end is the end of the phase.
    private(set) var work: Task<Void, Never>?

    init(
        store: ModelStore = ModelStore(),
        open: @escaping @Sendable (URL) throws -> ShardmillModel = { try ShardmillModel(at: $0) }
    ) {
        (self.store, openModel) = (store, open)
    }

    /// Open the first build of the store, if there is one.
    func openFirst() {
        if let first = store.models().first { open(first.folder) }
    }

    /// Copy a build into the store and open it.
    func add(_ folder: URL) {
        guard isFree() else { return }
        phase = .loading("copying", 0)
        run { [store] in
            #if canImport(Darwin)
            let isForeign = folder.startAccessingSecurityScopedResource()
            defer { if isForeign { folder.stopAccessingSecurityScopedResource() } }
            #endif
            let name = folder.lastPathComponent
            for try await step in store.importBuild(at: folder, name: name) {
                self.phase = .loading("copying \(step.file)", step.fraction)
            }
            try await self.load(store.folder.appending(path: name))
        }
    }

    func open(_ folder: URL) {
        guard isFree() else { return }
        phase = .loading("opening", 0)
        run { try await self.load(folder) }
    }

    private func isFree() -> Bool {
        if phase == .empty || phase == .ready { return true }
        note = "\(name) is at work: stop the answer, or wait until the model is loaded"
        return false
    }

    /// Do some work and show how it ends. What was interrupted by the background goes on when the app comes back.
    private func run(_ work: @escaping @MainActor () async throws -> Void) {
        note = ""
        self.work = Task {
            do { try await work() } catch let error as ShardmillError {
                note = [error.message, error.recoverySuggestion].compactMap { $0 }.joined(separator: ". ")
            } catch { note = error is CancellationError ? "" : "\(error)" }
            phase = chat == nil ? .empty : .ready
        }
    }

    private func load(_ folder: URL) async throws {
        let open = openModel
        let model = try await Task.detached { try open(folder) }.value  // a large vocabulary takes a second
        if isHidden { model.pause() }
        (self.model, chat, lines, speed, verdict) = (model, nil, [], "", "")
        name = model.manifest.model
        while true {
            do {
                for try await step in model.prewarm() {
                    phase = .loading("\(step.work.rawValue) \(step.part)", step.fraction)
                }
                break
            } catch let error as ShardmillError where error.kind == .interrupted {
                phase = .loading("waiting until the app is in front", 0)
                if isHidden { await withCheckedContinuation { front = $0 } }
            }
        }
        let takesInstructions = model.manifest.chat?.system != nil
        chat = model.chat(instructions: takesInstructions ? "Answer briefly." : "")
    }

    func send(_ text: String) {
        guard phase == .ready, let chat, !text.isEmpty else { return }
        lines += [Line(isUser: true, text: text), Line(isUser: false, text: "")]
        phase = .answering
        run {
            for try await piece in chat.pieces(text) {
                switch piece {
                case .thought(let more): self.lines[self.lines.count - 1].thought += more
                case .text(let more), .call(let more): self.lines[self.lines.count - 1].text += more
                }
            }
            guard let last = await chat.last else { return }
            let (speed, reused) = (Int(last.tokensPerSecond), last.promptTokensReused)
            self.speed = "\(speed) tokens/s, \(reused) of \(last.promptTokens) tokens were in the cache"
        }
    }

    /// End the answer; the conversation goes on from before the question.
    func stop() { work?.cancel() }

    /// Begin a new conversation with the model.
    func clear() {
        guard phase == .ready, let chat else { return }
        lines = []
        run { try await chat.clear() }
    }

    /// Compare the model with what its build expects.
    func check() {
        guard phase == .ready, let model else { return }
        phase = .loading("checking", 0)
        run { self.verdict = try await model.check().summary }
    }

    func isInBackground(_ hidden: Bool) {
        isHidden = hidden
        if hidden { return model?.pause() ?? () }
        model?.resume()
        front?.resume()
        front = nil
    }

    func memoryIsLow() {
        Task { await model?.unload() }
    }
}
