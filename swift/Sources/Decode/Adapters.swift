import Foundation

/// An adapter as it lies in a build's folder, to be compared with what lies there later under the same name.
struct AdapterVersion: Equatable {
    let name: String
    /// adapter.json, which has the digest of the matrices; nil if there is none.
    let receipt: Data?
    /// When the file of the matrices was written.
    let written: Date?
}

extension Manifest {
    private var adapterFolder: URL { folder.appendingPathComponent("adapters") }

    /// The names of the build's adapters, sorted; `shardmill adapter add` adds them.
    public var adapterNames: [String] {
        let found = (try? FileManager.default.contentsOfDirectory(atPath: adapterFolder.path)) ?? []
        return found.filter { FileManager.default.fileExists(atPath: adapterFile($0).path) }.sorted()
    }

    private func adapterFile(_ name: String) -> URL {
        adapterFolder.appendingPathComponent(name).appendingPathComponent("adapter.safetensors")
    }

    /// Return which version of an adapter the build has now.
    func adapterVersion(_ name: String) -> AdapterVersion {
        let file = adapterFile(name)
        let receipt = file.deletingLastPathComponent().appendingPathComponent("adapter.json")
        let attributes = try? FileManager.default.attributesOfItem(atPath: file.path)
        return AdapterVersion(
            name: name, receipt: try? Data(contentsOf: receipt), written: attributes?[.modificationDate] as? Date)
    }

    /// Return an adapter's matrices by part and input, each of the input's shape.
    ///
    /// - Throws: `ShardmillError` if the build takes no adapters or has none of that name, or if the file is damaged.
    func adapter(_ name: String) throws -> [String: [String: HostArray]] {
        if adapterRank == nil {
            throw ShardmillError(
                .request, "\(model) takes no adapters: set `program.adapters` in its config and build again")
        }
        let names = adapterNames
        if !names.contains(name) {
            let has = names.isEmpty ? "none" : names.joined(separator: ", ")
            throw ShardmillError(.request, "\(model): no adapter is called '\(name.prefix(100))'; it has \(has)")
        }
        let file = try TensorFile(adapterFile(name))
        var found: [String: [String: HostArray]] = [:]
        for part in parts {
            for input in part.adapters {
                let shape = part.inputs[input]!.map { $0.count(tokens: 1) }
                found[part.name, default: [:]][input] = try file.halves("\(part.name).\(input)", shape: shape)
            }
        }
        return found
    }
}
