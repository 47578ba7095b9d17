import Foundation
import Observation
import Shardmill

/// What the window shows: a build, its loading, and one conversation. It knows nothing of SwiftUI.
@MainActor @Observable
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
    }

    private(set) var phase = Phase.empty
    private(set) var name = "No model"
    private(set) var lines: [Line] = []
    /// The last error or the speed of the last answer.
    private(set) var note = ""
    private var model: ShardmillModel?
    private var chat: Chat?
    private var work: Task<Void, Never>?

    /// Where builds are kept: the system keys what it makes for the Neural Engine by the path.
    static var builds: URL {
        let home = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        return (home ?? FileManager.default.temporaryDirectory).appending(path: "models")
    }

    /// Open the first build of `builds`, if there is one.
    func openFirst() {
        let folders =
            (try? FileManager.default.contentsOfDirectory(at: Self.builds, includingPropertiesForKeys: nil)) ?? []
        let names = folders.map(\.lastPathComponent).sorted()
        if let first = names.first(where: { !$0.hasPrefix(".") }) { open(Self.builds.appending(path: first)) }
    }

    /// Copy a build into `builds` and open it.
    func add(_ folder: URL) {
        let target = Self.builds.appending(path: folder.lastPathComponent)
        do {
            try FileManager.default.createDirectory(at: Self.builds, withIntermediateDirectories: true)
            if !FileManager.default.fileExists(atPath: target.path) {
                try FileManager.default.copyItem(at: folder, to: target)
            }
            open(target)
        } catch {
            note = "\(error)"
        }
    }

    func open(_ folder: URL) {
        guard phase == .empty || phase == .ready else {
            note = "\(name) is at work: stop the answer, or wait until the model is loaded"
            return
        }
        do {
            let model = try ShardmillModel(at: folder)
            self.model = model
            name = model.manifest.model
            let takesInstructions = model.manifest.chat?.system != nil
            chat = model.chat(instructions: takesInstructions ? "Answer briefly." : "")
            lines = []
            work = Task { await prewarm(model) }
        } catch {
            note = "\(error)"
        }
    }

    private func prewarm(_ model: ShardmillModel) async {
        phase = .loading("Opening", 0)
        do {
            for try await step in model.prewarm() {
                let left = step.secondsLeft.map { ", about \(Int($0)) s left" } ?? ""
                phase = .loading("\(step.work.rawValue) \(step.part)\(left)", Double(step.place) / Double(step.of))
            }
            (phase, note) = (.ready, "")
        } catch {
            (phase, note) = (.empty, "\(error)")
        }
    }

    func send(_ text: String) {
        guard phase == .ready, let chat, !text.isEmpty else { return }
        lines += [Line(isUser: true, text: text), Line(isUser: false, text: "")]
        (phase, note) = (.answering, "")
        work = Task {
            do {
                for try await piece in chat.stream(text) { lines[lines.count - 1].text += piece }
                if let last = await chat.last {
                    let (speed, reused) = (Int(last.tokensPerSecond), last.promptTokensReused)
                    note = "\(speed) tokens/s, \(reused) of \(last.promptTokens) reused"
                }
            } catch {
                note = "\(error)"
            }
            phase = .ready
        }
    }

    /// End the answer; the conversation goes on from before the question.
    func stop() { work?.cancel() }

    func isInBackground(_ hidden: Bool) {
        if hidden { model?.pause() } else { model?.resume() }
    }

    func memoryIsLow() {
        Task { await model?.unload() }
    }
}
