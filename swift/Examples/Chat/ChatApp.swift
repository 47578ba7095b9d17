import SwiftUI

@main
struct ChatApp: App {
    @State private var model = ChatModel()
    @Environment(\.scenePhase) private var scene

    var body: some Scene {
        WindowGroup {
            ChatView(model: model)
                .task { model.openFirst() }
                #if os(iOS)
            .onReceive(NotificationCenter.default.publisher(for: UIApplication.didReceiveMemoryWarningNotification)) {
                _ in
                model.memoryIsLow()
            }
                #endif
        }
        .onChange(of: scene) { model.isInBackground(scene == .background) }
    }
}

struct ChatView: View {
    let model: ChatModel
    @State private var text = ""
    @State private var isChoosing = false
    @State private var isChecking = false

    var body: some View {
        NavigationStack {
            VStack(spacing: 0) {
                conversation
                status
                question
            }
            .navigationTitle(model.name)
            .toolbar {
                Button("New conversation", systemImage: "square.and.pencil", action: model.clear)
                Button("Check", systemImage: "checkmark.seal") { isChecking = true }
                Button("Open build", systemImage: "folder") { isChoosing = true }
            }
            .sheet(isPresented: $isChecking) { CheckView(model: model) }
            .fileImporter(isPresented: $isChoosing, allowedContentTypes: [.folder]) { chosen in
                if let folder = try? chosen.get() { model.add(folder) }
            }
        }
    }

    private var conversation: some View {
        ScrollView {
            LazyVStack(alignment: .leading, spacing: 12) {
                ForEach(model.lines) { line in
                    Text(line.thought.isEmpty ? line.text : "(\(line.thought))\n\n\(line.text)")
                        .padding(10)
                        .background(line.isUser ? Color.accentColor.opacity(0.2) : Color.secondary.opacity(0.1))
                        .clipShape(RoundedRectangle(cornerRadius: 12))
                        .frame(maxWidth: .infinity, alignment: line.isUser ? .trailing : .leading)
                        .textSelection(.enabled)
                }
            }
            .padding()
        }
        .defaultScrollAnchor(.bottom)
    }

    @ViewBuilder private var status: some View {
        if case .loading(let what, let share) = model.phase {
            ProgressView(value: share) { Text(what).font(.caption) }.padding(.horizontal)
        }
        if !model.note.isEmpty || !model.speed.isEmpty {
            Text(model.note.isEmpty ? model.speed : model.note).font(.caption).foregroundStyle(.secondary).padding(.horizontal)
        }
    }

    private var question: some View {
        HStack {
            TextField("Message", text: $text, axis: .vertical).onSubmit(send)
            if model.phase == .answering {
                Button("Stop", systemImage: "stop.fill", action: model.stop)
            } else {
                Button("Send", systemImage: "arrow.up", action: send).disabled(model.phase != .ready || text.isEmpty)
            }
        }
        .padding()
    }

    private func send() {
        model.send(text)
        text = ""
    }
}

/// The second screen: whether the model runs rightly here, and how fast.
struct CheckView: View {
    let model: ChatModel

    var body: some View {
        Form {
            LabeledContent("Model", value: model.name)
            LabeledContent("Speed", value: model.speed.isEmpty ? "ask something first" : model.speed)
            LabeledContent("Check", value: model.verdict.isEmpty ? "not run" : model.verdict)
            Button("Check now", action: model.check).disabled(model.phase != .ready)
            if case .loading(let what, let share) = model.phase { ProgressView(value: share) { Text(what) } }
            if !model.note.isEmpty { Text(model.note).foregroundStyle(.secondary) }
        }
        .padding()
    }
}
